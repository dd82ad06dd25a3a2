"""Sandboxes: where the commands of episodes run, held by a process that outlives those who use them.

`keeper.py` is that process, one for each run and machine. It answers calls over a unix socket (`wire.py`, whose client
is `client.py`) and ends all sandboxes when its parent closes its control connection, or dies. `table.py` has the
sandboxes: how many may live, fresh ones made ahead, fencing tokens, the end of those that nobody comes back to. Who has
one and wants a second, as a verifier does, waits in another queue, so that holders never wait for each other.

`effects.py` is a sandbox's effect log: a command is begun at most once under an id, and its result is told as often
as it is asked for. The log is in the keeper's memory and not inside the sandbox, where a command could forge it; it
lives exactly as long as the sandbox, so a caller that died finds both or neither. A command is stopped over a
connection of its own, since the one by which it was begun waits for it. Files go in and out through `cat` and `tar`
that run inside (`files.py`): the keeper opens no path that a command could have made a link of. What comes out is
read as data (`archives.py`).

A backend (`backend.py`) makes places in which commands run, and nothing else; deadlines, output caps, effects and files
are the same for all. `bwrap.py` starts bubblewrap for each command over folders that last: 25 ms, no daemon, nothing
that lives between commands. `docker.py` has one container for each sandbox and an exec for each command. `local.py`
isolates nothing. What a backend guarantees is what it was seen to hold when it started (`probing.py`); a task that asks
for more is refused by name, since a limit that is silently missing is worse than none.

bwrap as root gives every sandbox a user id of its own that has no rights on this machine, so that whoever got out of
the namespaces would be nobody. Without root the keeper enters a user namespace first, in which it can mount: bounds on
files, networks and layered workspaces are then the same, and only control groups (memory, processor time) are missing.
A network is none but for ports on the sandbox's own loopback, which the keeper listens on from inside its network
namespace (`network.py`): an HTTP proxy that connects to allowed addresses, and a gateway's socket. `relay.py` carries
the connections, for `local` from a port of the machine's loopback. Programs of the machine that lie outside of /usr are
shown by the option `read_only` (`bwrap_command.py`).
"""
