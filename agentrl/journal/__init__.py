"""The write-ahead journal: what a run has done, durable before anybody acts on it.

Three kinds of file, of which the first alone is the truth:

- **Segments** (``<writer>-00000001.journal``) are appended to, synced, and never changed. Every frame proves itself, a
  segment has one writer, and nothing is locked or mapped, so a crash or a loss of power costs at most what nobody
  was told is safe, on shared storage as on a local disk.
- **The index** (``index.sqlite``) says where each episode's entries lie and which episodes are final. SQLite is good at
  finding one row of a million and bad at being written by a process that is about to die on a file system without
  locks. So it only repeats what the segments say: it carries a checksum, is replaced as a whole, and is made anew
  whenever it is missing, damaged, of another schema or of other segments. `open_journal` and `read_life` use it;
  `read_journal` needs none. Its path may be on a local disk.
- **The archive** (``episodes/consumed-<step>-<number>.parquet``) holds what a checkpoint has made final: one row for an
  episode, with its scalars, its tokens in list columns and the exact record, which is its entries as the segments had
  them (`read_archived`). After `archive`, `prune` deletes the segments that nothing else needs. `settling` says when an
  episode is final. In a run `archiver` does both, in a process of its own, so that packing a long run's episodes never
  takes turns with its event loop.

Each writer waits for its disk in a thread, and one sync serves all entries that came during the one before it.

The archive is for other tools as it is::

    SELECT step, avg(reward), avg(turns) FROM 'runs/demo/episodes/*.parquet' WHERE outcome = 'trained' GROUP BY step

in DuckDB, or ``pandas.read_parquet("runs/demo/episodes", columns=["episode_id", "reward", "step"])``. The index is for
``sqlite3`` as well, but says nothing that is not in the segments.

On the disk are, beside the archive (`keep_bytes`, or its newest file if that is larger): the segments with an episode
in play, waiting to be trained, or trained since the last archived checkpoint, one segment of 64 MiB for each writer's
name, and the index with about 2 % of their size. In memory are one segment or a few dozen episodes at a time; a start
holds the lives of those episodes that are not final.
"""
