"""Child processes that answer typed calls over a socket, with deadlines, and can always be killed.

This is the one seam that a process border adds: a `ChildProcess` calls the methods of an object in another process.
A cluster runtime replaces the carrier, not the calls. A `Channel` carries calls in both directions, many at once,
between event loops.
"""
