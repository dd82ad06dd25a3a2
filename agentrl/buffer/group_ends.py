"""How groups end: trained, or left out with a reason, by one policy after the other; then each episode has a line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from agentrl.buffer.group import Group
from agentrl.buffer.lane import Lane
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.step_journal import StepJournal
from agentrl.buffer.task_order import TaskOrder
from agentrl.types.errors import Failure, StalledError


class GroupEnds:
    """Brings complete groups to their ends: on record first, then in the lanes, the ledger and the order of tasks."""

    def __init__(self, lanes: Mapping[str, Lane], journal: StepJournal, ledger: Ledger, order: TaskOrder) -> None:
        self._lanes, self._journal, self._ledger, self._order = lanes, journal, ledger, order

    def complete(self, group: Group, policies: Iterable[str], last_failure: Failure | None) -> StalledError | None:
        """Make a complete group ready for each policy that is to train it; leave it out, with a reason, for others.

        Returns the error if that leaves nothing to learn.
        """
        left_out, error = {}, None
        for policy in policies:
            lane = self._lanes[policy]
            reason = "run_ended" if lane.is_over else lane.drop_reason(group)
            if reason is None:
                lane.dropped.end_row()
                lane.ready.append(group)
            else:
                left_out[policy] = reason
                error = error or lane.dropped.add(reason, group.rewards, last_failure)
        self.leave_out(group, left_out)
        return error

    def leave_out(self, group: Group, reasons: Mapping[str, str]) -> None:
        """These policies will not train a group: their places come back. If none has or will, it is dropped."""
        group.left_out.update(reasons)
        if not group.trained_by and group.waits_for <= reasons.keys() and reasons:
            names = [episode.episode_id for episode in group.ordered()]
            self._journal.dropped(group, names, group.drop_reason)
            self._order.finish([group.number])
        else:
            for policy, reason in reasons.items():
                self._journal.left_out(group, policy, reason)
        for policy in reasons:
            lane = self._lanes[policy]
            lane.accepted -= group.size
            lane.groups_left = None if lane.groups_left is None else lane.groups_left + 1
            self._be_done(group, policy)

    def trained(self, group: Group, policy: str, step: int) -> None:
        """A policy has made the version of this step of a group."""
        group.trained_by[policy] = step
        self._be_done(group, policy)

    def end(self, group: Group) -> None:
        """All policies are done with a group; its tasks are done with the checkpoint that holds what they trained."""
        self._order.finish_with_checkpoint(group)
        if group.trained_by:
            self._journal.failed(group)
        self.write(group, group.drop_reason, group.started_step)

    def write(self, group: Group, reason: str, step: int) -> None:
        """A line for each episode: trained if any policy has, else dropped."""
        for episode in group.ordered():
            if group.trained_by:
                self._ledger.trained(episode, group.trained_tokens[episode.episode_id], group.trained_by)
            else:
                self._ledger.dropped(episode, reason, step)

    def _be_done(self, group: Group, policy: str) -> None:
        """Once all policies have trained a group or left it out, its episodes are at their end."""
        group.waits_for.discard(policy)
        if not group.waits_for:
            self.end(group)
