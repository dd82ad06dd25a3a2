"""Child processes that answer typed calls over a socket, with deadlines, and can always be killed.

This is the one seam that a process border adds. A `RemoteObject` calls the methods of an object in
another process; a `LoopbackObject` encodes and decodes the same way without leaving this one, so the
tests of either hold for both. A cluster runtime replaces the carrier, not the calls.
"""
