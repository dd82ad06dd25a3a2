from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.journal import entries as e
from agentrl.journal import index as index_module
from agentrl.journal.frames import Frame
from agentrl.journal.index import open_journal
from agentrl.journal.reading import JournalState, all_segments, read_journal
from agentrl.journal.segments import read_segment
from agentrl.types.version import PolicyVersion
from tests.unit.journal.journals import Journal, dropped, name_of, taken, told, whole_life


def scanned(folder: Path) -> JournalState:
    """The full scan without what is final, by brute force over pairs of entries."""
    frames = [f for path in all_segments(folder) for f in read_segment(path) if isinstance(f, Frame)]
    buffer = [e.unpack(f.schema, f.kind, f.payload) for f in frames if e.key_of(f.payload) == e.NO_EPISODE]
    state = read_journal(folder)
    open_places: set[int] = set()
    counted: list[tuple[int, int]] = []  # the checkpoint that covers an entry, and the entry
    for at, entry in enumerate(buffer):
        covers = [n for n in range(at + 1, len(buffer)) if _covers(buffer[n], entry)]
        if not covers:
            open_places.add(at)
        elif not any(_is_same_step(later, entry) for later in buffer[at + 1 : covers[0]]):
            counted.append((covers[0], at))
    done: dict[str, dict[str, int]] = {}
    final: set[str] = set()
    for _, at in sorted(counted):
        for name, policy, policies in _done_with(buffer[at]):
            of_episode = done.setdefault(name, {})
            of_episode[policy] = at
            final |= {name} if of_episode.keys() >= set(policies) else set()
    open_places.update(at for name in done.keys() - final for at in done[name].values())
    found = JournalState(checkpointed=state.checkpointed, torn_tails=state.torn_tails)
    for at in sorted(open_places):
        if not isinstance(buffer[at], e.Checkpointed):
            found.note(buffer[at])
    found.lives = {name: life for name, life in state.lives.items() if name not in final}
    return found


def _covers(later: e.Entry, entry: e.Entry) -> bool:
    if not isinstance(later, e.Checkpointed) or isinstance(entry, e.Checkpointed):
        return False
    makes = {e.Taken: 1, e.Stepped: 0}.get(type(entry))
    return makes is None or later.steps.get(entry.policy, 0) >= entry.version.step + makes


def _is_same_step(later: e.Entry, entry: e.Entry) -> bool:
    both = isinstance(later, e.Taken) and isinstance(entry, e.Taken)
    return both and (later.policy, later.version.step) == (entry.policy, entry.version.step)


def _done_with(entry: e.Entry) -> list[tuple[str, str, tuple[str, ...]]]:
    """Which policy is done with which episode, and which must be."""
    if isinstance(entry, e.Taken):
        return [(name, entry.policy, entry.policies[0]) for _, names in entry.groups for name in names]
    if isinstance(entry, e.LeftOut):
        return [(name, entry.policy, entry.policies) for name in entry.episodes]
    return [(name, "", ()) for name in entry.episodes] if isinstance(entry, e.Dropped) else []


EPISODES = st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True)
STEPS = st.integers(0, 4)
POLICY = st.sampled_from(["main", "other"])
BOTH = ("main", "other")
OPERATIONS = st.one_of(
    st.tuples(st.just("play"), st.integers(0, 9), st.integers(1, 5), st.sampled_from(["worker", "other", "buffer"])),
    st.tuples(st.just("take"), POLICY, STEPS, EPISODES, st.booleans()),
    st.tuples(st.just("leave out"), POLICY, EPISODES),
    st.tuples(st.just("step"), POLICY, STEPS),
    st.tuples(st.just("drop"), STEPS, EPISODES),
    st.tuples(st.just("checkpoint"), STEPS, STEPS),
    st.tuples(st.just("rotate"), st.sampled_from(["worker", "other", "buffer"])),
    st.tuples(st.just("open")),
    st.tuples(st.just("tear"), st.integers(1, 60)),
)


def _apply(journal: Journal, operation: tuple) -> None:
    match operation:
        case "play", number, count, writer:
            journal.play(number, whole_life(number, 1)[:count], writer)
        case "take", policy, step, episodes, is_alone:
            journal.note(taken(step, *episodes, policy=policy, policies=(policy,) if is_alone else BOTH))
        case "leave out", policy, episodes:
            journal.note(e.LeftOut(policy, 0, tuple(map(name_of, episodes)), "no_spread", BOTH))
        case "step", policy, step:
            journal.note(e.Stepped(policy, PolicyVersion(0, step)))
        case "drop", step, episodes:
            journal.note(dropped(step, *episodes))
        case "checkpoint", step, other:
            journal.note(e.Checkpointed({"main": step, "other": other}))
        case "rotate", writer:
            journal.rotate(writer)
        case ("open",):
            assert told(open_journal(journal.folder)) == told(scanned(journal.folder))
        case "tear", count:
            _tear_last(journal, count)


def _tear_last(journal: Journal, count: int) -> None:
    """What a crash in mid-write leaves in the worker's segment: bytes that are no frame."""
    journal.play(0, whole_life(0)[:1])
    path = max(all_segments(journal.folder), key=lambda path: (path.name.startswith("worker"), path.name))
    journal.close("worker")
    with path.open("ab") as file:
        file.write(b"\x7e" * count)


@settings(max_examples=100)
@given(st.lists(OPERATIONS, max_size=25))
def test_what_is_not_final_is_what_a_full_scan_says(operations: list[tuple]) -> None:
    with tempfile.TemporaryDirectory() as name:
        journal = Journal(Path(name) / "journal")
        for operation in operations:
            _apply(journal, operation)
        assert told(open_journal(journal.folder)) == told(scanned(journal.folder))


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Episodes 0 and 1 trained for good, 2 dropped for good, 3 taken but not covered, 4 and 5 in play."""
    journal = Journal(tmp_path / "journal")
    for number in range(6):
        journal.play(number, whole_life(number)[: 3 if number > 3 else None])
    journal.note(taken(0, 0, 1), dropped(0, 2), e.Checkpointed({"main": 1}), taken(1, 3))
    return journal


def test_only_what_is_not_final_is_returned(journal: Journal) -> None:
    state = open_journal(journal.folder)
    assert sorted(state.lives) == [name_of(3), name_of(4), name_of(5)]
    assert (state.taken, state.dropped, state.checkpointed) == ([taken(1, 3)], [], {"main": 1})


def test_entries_of_final_episodes_are_not_decoded(journal: Journal, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = []
    unpack = e.unpack
    monkeypatch.setattr(index_module, "unpack", lambda *frame: decoded.append(frame) or unpack(*frame))
    assert len(open_journal(journal.folder).lives) == 3
    assert len(decoded) == 4 + 6 + 3 + 3


def test_a_step_that_is_taken_again_releases_the_episodes_of_the_lost_attempt(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        journal.play(number, whole_life(number))
    journal.note(taken(0, 0), taken(0, 1), e.Checkpointed({"main": 1}))
    assert sorted(open_journal(journal.folder).lives) == [name_of(0), name_of(2)]


def test_an_episode_is_final_once_every_policy_that_trains_it_is_done_with_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for number in range(3):
        journal.play(number, whole_life(number))
    mine = taken(0, 0, 1, policy="main", policies=BOTH)
    journal.note(mine, e.Checkpointed({"main": 1, "other": 0}))
    state = open_journal(journal.folder)
    assert sorted(state.lives) == [name_of(0), name_of(1), name_of(2)]
    assert state.taken == [mine], "who goes on with the other policy must know that this one is done"
    journal.note(e.LeftOut("other", 0, (name_of(0),), "no_spread", BOTH))
    journal.note(taken(3, 1, policy="other", policies=BOTH), e.Checkpointed({"main": 1, "other": 4}))
    assert sorted(open_journal(journal.folder).lives) == [name_of(2)]


def test_a_segment_whose_end_cannot_be_read_is_read_up_to_there(journal: Journal) -> None:
    path = next(journal.folder.glob("worker-*"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    state = open_journal(journal.folder)
    assert told(state) == told(scanned(journal.folder))
    assert len(state.lives[name_of(5)].entries) == 2


def test_a_folder_without_segments_holds_nothing_and_is_not_made(tmp_path: Path) -> None:
    assert told(open_journal(tmp_path / "none")) == told(JournalState())
    assert not (tmp_path / "none").exists()
