"""The episode buffer: admission, groups, staleness, and where every episode ended up.

Why the bound holds. Let B be episodes per step, S the staleness bound, v_l the version that engines have
loaded. Admission keeps (taken + outstanding) <= (S + v_l + 1) * B. An episode that starts at o = v_l has
at most (S + o + 1) * B - 1 others taken before it or with it if the oldest are taken first, so it is
taken at a step of version <= o + S. Engines load v+1 only after the trainer made it, so v_l <= v, and
places come back only with `loaded`. Under ``mask_spans`` younger episodes may be taken first: the bound
then acts on spans, by masking; under ``wait`` the take itself keeps the order that the argument needs. With S
``unbounded`` places alone bound admission, and nothing is masked for its age. With several policies each has this
bound over the groups that it trains (`lane.py`), and an episode begins where all policies that train it have room.

What is durable, and why that is enough. The buffer keeps its states in memory and writes down only what it decided:
which groups a step took, what a step made, which groups were dropped, up to where a checkpoint reaches. Everything
else follows from the histories of episodes, which their worker writes: a group is what its leases say, ready when all
of them ended, its place in the order its number. So recovery (`recovery.py`) is a function of the journal and the
checkpoint's frontiers, and the same function whatever the moment of the crash. A step is on record before it is
done, so it is redone from the same episodes in the same order; its result is on record before anybody sees it, so
weights that were served either come back bit for bit or under a new epoch. Nothing is final before a checkpoint:
the ledger is cut back to the newest one and its lines are derived again.
"""
