"""The end of a run: it has finished once every episode of its ledger is in the archive.

The ledger is whole when the loops have ended, and the run is `unarchived` from then on. Episodes that no step took have
their end in the ledger alone: it is put on record first, behind it a checkpoint that makes all of them final, and then
the archiver is waited for. A process that dies in between leaves nothing that could not be done again, by
`agentrl resume`, which starts neither engines nor a trainer for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.buffer.ledger import LedgerLine, read_ledger
from agentrl.journal.claim import Claim
from agentrl.journal.entries import Dropped, LeftOut, episode_key
from agentrl.journal.index import JournalIndex
from agentrl.orchestration.config import RunConfig
from agentrl.orchestration.run_directory import RunDirectory, RunState, RunStatus
from agentrl.orchestration.run_journal import RunJournal
from agentrl.types.errors import ConfigError, StorageError
from agentrl.types.version import PolicyVersion


@dataclass(frozen=True, slots=True)
class ArchiveCompleted:
    """A run had ended without all of its ledger in the archive; `episodes` of it came to it now."""

    run: Path
    version: PolicyVersion
    episodes: int


async def end_run(
    run: RunDirectory, config: RunConfig, journal: RunJournal, versions: Mapping[str, PolicyVersion]
) -> int:
    """Bring all episodes of an ended run's ledger to the archive and mark it as finished; returns how many it lacked.

    Waits for: the archiver. Unblocked by: its end, or its deadline.

    Raises:
        StorageError: some are still not there. The run stays `unarchived`, with the reason in its state.
    """
    missing: list[LedgerLine] = []
    try:
        if journal.is_durable:
            await journal.settled()
            missing = await asyncio.to_thread(_missing, run)
        if missing:
            steps = {policy: version.step for policy, version in versions.items()}
            await journal.buffer.over(await asyncio.to_thread(_ends, missing, config, run), steps)
            await journal.archive()
            await asyncio.to_thread(_check_complete, run)
        journal.check()
        run.write_state(RunState(RunStatus.FINISHED, dict(versions)))
    except StorageError as error:
        if journal.is_held:
            run.write_state(RunState(RunStatus.UNARCHIVED, dict(versions), str(error)))
        raise
    return len(missing)


async def complete_archive(run: RunDirectory, config: RunConfig, state: RunState) -> ArchiveCompleted:
    """Do what is left of the end of a run that has made all its steps.

    Raises:
        ConfigError: nothing is left, or a process that lives has the run.
        StorageError: episodes are still missing.
    """
    is_durable = config.journal.kind != "none"
    missing = await asyncio.to_thread(_missing, run) if is_durable else []
    if state.status is RunStatus.FINISHED and not missing:
        raise ConfigError(f"{run.path} is finished at version {state.version}; nothing is left to resume")
    journal = RunJournal.of_ended(Claim.take(run.journal), run, config) if is_durable else RunJournal.none()
    try:
        added = await end_run(run, config, journal, state.versions)
    finally:
        await journal.close()
    return ArchiveCompleted(run.path, state.version, added)


def _missing(run: RunDirectory) -> list[LedgerLine]:
    """Lines of the ledger whose episodes the journal has and the archive has not. Raises StorageError."""
    # Parquet's library takes a while to load, and only the end of a run needs it here.
    from agentrl.journal.archive import unarchived

    keys = unarchived(JournalIndex(run.journal), run.episodes)
    lines = read_ledger(run.ledger) if run.ledger.is_file() else []
    return [line for line in lines if episode_key(line.episode_id) in keys]


def _check_complete(run: RunDirectory) -> None:
    if missing := _missing(run):
        raise StorageError(
            f"{len(missing)} episodes of {run.ledger} are not in the archive {run.episodes}, {missing[0].episode_id} "
            f"is the first: see {run.logs / 'archiver.log'}, then `agentrl resume {run.path}`"
        )


def _ends(lines: Iterable[LedgerLine], config: RunConfig, run: RunDirectory) -> list[Dropped | LeftOut]:
    """What is to be on record of episodes of which the journal says no end yet."""
    unfinished = set(JournalIndex(run.journal).unfinished)
    dropped: dict[tuple[int, str, int], list[str]] = {}
    left_out: dict[tuple[int, str, tuple[str, ...]], list[str]] = {}
    for line in lines:
        if episode_key(line.episode_id) not in unfinished:
            continue
        if line.outcome == "dropped":
            dropped.setdefault((line.group, line.reason, line.step), []).append(line.episode_id)
            continue
        # The checkpoint makes final what was trained, once the policies are done with it that have not trained it.
        policies = config.trained_in(line.environment)
        for policy in policies:
            if policy not in line.trained_by:
                left_out.setdefault((line.group, policy, policies), []).append(line.episode_id)
    return [
        *(Dropped(group, tuple(names), reason, step) for (group, reason, step), names in dropped.items()),
        *(
            LeftOut(policy, group, tuple(names), "run_ended", policies)
            for (group, policy, policies), names in left_out.items()
        ),
    ]
