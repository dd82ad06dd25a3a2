"""What a journal means for a group that one policy has trained and another has not."""

from __future__ import annotations

from dataclasses import replace

from agentrl.buffer.recovery import RecoveryTerms, recover
from agentrl.journal import entries as e
from agentrl.journal.history import EpisodeHistory, build_history
from agentrl.journal.reading import JournalState
from agentrl.testing.builders import build_ticket
from agentrl.types.environment import Score, ScoreRecord
from agentrl.types.episode import Agent, StopReason
from agentrl.types.version import PolicyVersion

POLICIES = ("speaker", "listener")
AGENTS = tuple(Agent(policy, policy) for policy in POLICIES)
FIRST = PolicyVersion(0, 0)


def ended(member: int) -> EpisodeHistory:
    ticket = build_ticket(f"train-000000-{member}", 0, member)
    ticket = replace(ticket, started_at=dict.fromkeys(POLICIES, FIRST))
    verdict = e.Scored(1, ScoreRecord("verifier", Score(member / 4)))
    history = build_history([e.Leased(ticket, AGENTS, 1), verdict, e.Ended(1, StopReason.ANSWERED, None, 1.0)])
    assert history is not None
    return history


def test_members_that_failed_before_a_group_was_taken_are_not_played_again_for_the_policy_that_still_waits() -> None:
    lives = {history.ticket.episode_id: history for history in map(ended, (0, 2))}
    taken = e.Taken("speaker", FIRST, ((0, tuple(lives)),), (POLICIES,))
    terms = RecoveryTerms({"speaker": 1, "listener": 0}, {"fake": POLICIES}, {"fake": ("verifier",)}, 4, 1)
    recovered = recover(JournalState(lives=lives, taken=[taken]), terms)
    [group] = recovered.groups
    assert (group.is_complete, group.waits_for, group.trained_by) == (True, {"listener"}, {"speaker": 1})
    assert [episode.episode_id for episode in group.ordered()] == list(lives)
    assert (recovered.running, recovered.trained) == ((), {0: {"speaker": FIRST}})
