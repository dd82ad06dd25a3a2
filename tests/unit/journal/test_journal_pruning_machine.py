"""Whatever order of starts, episodes, checkpoints and interrupted prunings: nothing goes that is not archived."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pyarrow.parquet as pq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from agentrl.journal import entries as e
from agentrl.journal import pruning
from agentrl.journal.archive import archive
from agentrl.journal.archive_file import archive_files
from agentrl.journal.index import open_journal
from agentrl.journal.reading import read_journal
from tests.unit.journal.journals import Journal, dropped, name_of, taken, told, whole_life

STARTED = st.sampled_from([("worker",), ("buffer",), ("worker", "buffer"), ("buffer", "buffer", "worker")])
CUTS = st.sampled_from([1, 3, 5, 5])


class _KilledError(Exception):
    """Stands for the death of a process between two deletions."""


class PruningMachine(RuleBasedStateMachine):
    """Episodes are played in parts over several segments, consumed, checkpointed, archived and pruned."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        self.root = Path(self._folder.name)
        self.journal = Journal(self.root / "journal")
        self.target = self.root / "episodes"
        self.rest: dict[int, list[e.EpisodeEntry]] = {}
        self.ended: list[int] = []
        self.consumed: list[int] = []
        self.final: set[int] = set()
        self.step = self.count = 0

    @rule(writers=STARTED)
    def start(self, writers):
        """Segments are made; a start that is killed then leaves them empty."""
        for writer in writers:
            self.journal.rotate(writer)

    @rule(cut=CUTS)
    def begin_an_episode(self, cut):
        self.rest[self.count] = whole_life(self.count)
        self._play(self.count, cut)
        self.count += 1

    @precondition(lambda self: self.rest)
    @rule(data=st.data(), cut=CUTS)
    def go_on_with_an_episode(self, data, cut):
        self._play(data.draw(st.sampled_from(sorted(self.rest))), cut)

    @precondition(lambda self: self.ended)
    @rule(data=st.data(), is_trained=st.booleans())
    def consume_an_episode(self, data, is_trained):
        number = data.draw(st.sampled_from(self.ended))
        self.ended.remove(number)
        self.consumed.append(number)
        self.journal.note(taken(self.step, number) if is_trained else dropped(self.step, number))
        self.step += is_trained

    @rule()
    def save_a_checkpoint(self):
        self.journal.note(e.Checkpointed(self.step))
        self.final |= set(self.consumed)
        self.consumed = []

    @rule(writers=STARTED)
    def train_an_episode_and_start_anew(self, writers):
        self.begin_an_episode(5)
        self.journal.note(taken(self.step, self.ended.pop()), e.Checkpointed(self.step + 1))
        self.final |= {*self.consumed, self.count - 1}
        self.step, self.consumed = self.step + 1, []
        self.start(writers)

    @rule(deletions=st.sampled_from([0, 1, 2, 1000]))
    def archive_and_prune(self, deletions):
        """Pruning dies after some deletions; a few at most are due."""
        before = told(open_journal(self.journal.folder))
        archive(self.journal.folder, self.target)
        delete, left = pruning._delete, iter(range(deletions))

        def delete_or_die(path):
            if next(left, None) is None:
                raise _KilledError
            delete(path)

        pruning._delete = delete_or_die
        try:
            pruning.prune(self.journal.folder, self.target)
        except _KilledError:
            pass
        finally:
            pruning._delete = delete
        assert told(open_journal(self.journal.folder)) == before

    @invariant()
    def everything_is_in_the_journal_or_archived_once(self):
        archived = [n for f in archive_files(self.target) for n in pq.read_table(f)["episode_id"].to_pylist()]
        assert len(archived) == len(set(archived))
        assert set(archived) <= {name_of(number) for number in self.final}
        lives = read_journal(self.journal.folder).lives
        wholes = {name for name, life in lives.items() if life.is_whole and life.entries[0].token == 1}
        assert {name_of(number) for number in range(self.count)} <= set(archived) | wholes

    def teardown(self):
        self._folder.cleanup()

    def _play(self, number: int, cut: int) -> None:
        entries = self.rest.pop(number)
        self.journal.play(number, entries[:cut])
        if entries[cut:]:
            self.rest[number] = entries[cut:]
        else:
            self.ended.append(number)


PruningMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPruning = PruningMachine.TestCase
