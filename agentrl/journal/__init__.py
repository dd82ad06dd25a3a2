"""The write-ahead journal: what a run has done, durable before anybody acts on it.

**Segments** (``<writer>-00000001.journal``) are the truth. They are appended to, synced, and never changed. Every frame
proves itself, a segment has one writer, and nothing is locked or mapped, so a crash or a loss of power costs at most
what nobody was told is safe, on shared storage as on a local disk. Each writer waits for its disk in a thread of its
process, and one sync serves all entries that came during the one before it. Any number of writers share a folder: an
episode's entries are put in order by the fencing tokens of those that held it.

**The archive** (``episodes/consumed-<step>-<digest>-<number>.parquet``) holds what a checkpoint has made final: one row
for an episode, with its scalars, its tokens in list columns and the exact record, which is its entries as the segments
had them. Other tools read it as it is::

    SELECT step, avg(reward), avg(turns) FROM 'runs/demo/episodes/*.parquet' WHERE outcome = 'trained' GROUP BY step

in DuckDB, or ``pandas.read_parquet("runs/demo/episodes", columns=["episode_id", "reward", "step"])``.

**A compacted segment** (``compacted-<claim>-<number>.journal``) takes the place of all segments that are full or of an
earlier start, once what is final in them is archived. It has its name once it is whole, begins with the numbers of the
segments that it replaces, and holds what of them is not final. Segments that it replaces are passed over until they are
deleted, so neither a crash nor a loss of power between the two is seen.

What happens to an entry, and where:

1. `entries` says what there is to record; `writer` gathers the entries of all tasks, `appender` writes them to the
   newest of `segments` as `frames` and syncs, if `claim` says that the run is still this process's.
2. A start reads all segments. `history` builds each episode's history from its entries; those of a worker that had lost
   its lease do not count. `index` leaves out what is final, by the rule of `finality`; `durable_offsets` raises if a
   segment ends before what the newest checkpoint knows to be durable. `reading` can pass over damage and `rewriting`
   makes a compacted segment of what is left: `agentrl resume RUN --salvage`.
   While a run goes on, `holder` reads what a rollout worker whose process is gone has left of its episodes.
3. Behind a checkpoint, `archiver`, a process of its own that never takes turns with the run's event loop, scans the
   segments once into an `index`; `archive` writes what became final by `archive_file`, then `compaction` makes a
   compacted segment if that takes at most half of what it replaces. The end of a run makes all that is left final,
   and waits for the archive.

On the disk are, beside the archive (`keep_bytes`, or its newest file if that is larger): twice the entries of episodes
that are in play, wait to be trained, or were trained since the last archived checkpoint, and one segment of 64 MiB for
each writer's name. In memory are one segment or a few dozen episodes at a time; a start holds the histories of those
episodes that are not final, and so does compaction.
"""
