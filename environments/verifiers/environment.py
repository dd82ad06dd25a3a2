"""One episode of a taskset: verifiers plays it when the scaffold says so, and what it scored is the score."""

from __future__ import annotations

import asyncio

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.message import Message, Role
from agentrl.types.sandbox import GATEWAY_URL_VARIABLE, Command, CommandResult, Ended
from agentrl.types.task import Task
from agentrl_environments.verifiers.played import Played, Rollouts


class VerifiersEnvironment:
    """A rollout of verifiers, from the task to the rewards.

    The reward is that of verifiers' trace. An episode that verifiers could not score has none; one that failed there is
    failed here, by the errors that verifiers names.
    """

    def __init__(self, rollouts: Rollouts, task: Task) -> None:
        self._rollouts, self._task = rollouts, rollouts.task(task.payload["index"])
        if self._task.key != task.payload["key"]:
            raise ConfigError(
                f"task {self._task.index} of {self._rollouts.name} is another one now: its key was "
                f"{task.payload['key']} and is {self._task.key}; a taskset has to give the same tasks each time"
            )
        self._played: Played | None = None
        self._rollout: asyncio.Task[Played] | None = None
        self._is_stopped = False

    async def start(self) -> Opening:
        """The task's prompt, as far as it has one; verifiers itself gives it to the policy."""
        return Opening((Message(Role.USER, self._task.prompt),))

    async def run(self, command: Command, effect_id: str) -> CommandResult:
        """Let verifiers play the task, by replies of the gateway that the command names.

        Waits for: its end. Unblocked by: it, the command's timeout, or `stop`.
        """
        (agent,) = command.arguments
        url, key = command.environment[GATEWAY_URL_VARIABLE], command.environment["OPENAI_API_KEY"]
        episode = effect_id.partition("/")[0]
        started = asyncio.get_running_loop().time()
        playing = self._rollouts.play(self._task, f"{url}/sessions/{key}/v1", agent, episode)
        self._rollout = asyncio.create_task(playing, name=effect_id)
        if self._is_stopped:
            self._rollout.cancel()
        done, _ = await asyncio.wait({self._rollout}, timeout=command.timeout_s)
        self._rollout.cancel()
        await asyncio.wait({self._rollout})
        seconds = asyncio.get_running_loop().time() - started
        if self._rollout.cancelled():
            ended = Ended.STOPPED if done else Ended.TIMEOUT
            return CommandResult(137, b"", b"", 0, 0, seconds, ended)
        self._played = self._rollout.result()
        said = self._played.last_words.encode()
        return CommandResult(int(bool(self._played.errors)), said, b"", len(said), 0, seconds)

    async def stop(self, effect_id: str) -> None:
        """End the rollout, which is then scored no more."""
        self._is_stopped = True
        if self._rollout is not None:
            self._rollout.cancel()

    async def step(self, action: Message) -> StepResult:
        """The end: whatever was to be done has been done by `run`. Raises EpisodeError for a rollout that failed."""
        if self._played is None:
            raise EpisodeError(
                Boundary.TIMEOUT, "verifiers.rollout", "verifiers had not ended at the scaffold's timeout_s"
            )
        if self._played.errors:
            raise EpisodeError(Boundary.ENVIRONMENT, "rollout", "; ".join(self._played.errors))
        return StepResult(is_done=True)

    async def score(self) -> Score:
        """What verifiers scored; no reward where it did not."""
        return Score(None) if self._played is None else self._played.score

    async def close(self) -> None:
        """End the rollout, if it still runs."""
        if self._rollout is not None:
            self._rollout.cancel()
            await asyncio.wait({self._rollout})
