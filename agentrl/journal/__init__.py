"""The write-ahead journal: what a run has done, durable before anybody acts on it.

**Segments** (``<writer>-00000001.journal``) are the truth. They are appended to, synced, and never changed. Every frame
proves itself, a segment has one writer, and nothing is locked or mapped, so a crash or a loss of power costs at most
what nobody was told is safe, on shared storage as on a local disk. Each writer waits for its disk in a thread of the
run, and one sync serves all entries that came during the one before it.

**The archive** (``episodes/consumed-<step>-<number>.parquet``) holds what a checkpoint has made final: one row for an
episode, with its scalars, its tokens in list columns and the exact record, which is its entries as the segments had
them. After `archive`, `prune` deletes the segments that nothing else needs. In a run `archiver` does both, in a process
of its own, so that packing a long run's episodes never takes turns with its event loop. Other tools read it as it is::

    SELECT step, avg(reward), avg(turns) FROM 'runs/demo/episodes/*.parquet' WHERE outcome = 'trained' GROUP BY step

in DuckDB, or ``pandas.read_parquet("runs/demo/episodes", columns=["episode_id", "reward", "step"])``.

What happens to an entry, and where:

1. `entries` says what there is to record; `writer` gathers the entries of all tasks, `appender` writes them to the
   newest of `segments` as `frames` and syncs, if `claim` says that the run is still this process's.
2. A start reads all segments. `history` builds each episode's history from its entries; those of a worker that had lost
   its lease do not count. `index` leaves out what is final, by the rule of `finality`; `durable_offsets` raises if a
   segment ends before what the newest checkpoint knows to be durable. `reading` can pass over damage and `rewriting`
   makes a journal of what is left: `agentrl resume RUN --salvage`.
3. Behind a checkpoint, `archive_query` says which episodes became final, `archive` writes them by `archive_file`, and
   `pruning` deletes segments.

On the disk are, beside the archive (`keep_bytes`, or its newest file if that is larger): the segments with an episode
in play, waiting to be trained, or trained since the last archived checkpoint, and one segment of 64 MiB for each
writer's name. In memory are one segment or a few dozen episodes at a time; a start holds the histories of those
episodes that are not final.
"""
