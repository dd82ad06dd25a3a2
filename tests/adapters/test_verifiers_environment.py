"""Tasksets of verifiers 0.4.0 through the environment ``verifiers``, each in verifiers' own virtual environment."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.hosting import build_host
from agentrl.gateway.starting import LazyGateway
from agentrl.journal.archive_file import read_consumed
from agentrl.process.ports import free_port
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import TINY_SHAPE, make_tiny_model, tiny_chat
from agentrl.types.episode import Episode, StopReason
from agentrl.types.errors import ConfigError, EpisodeError
from agentrl.types.generation import Generation, GenerationRequest, Sampling
from agentrl.types.message import Message, Role
from agentrl.types.task import Limits, Split
from agentrl.types.trajectory import Trajectory, build_trajectories
from agentrl_scaffolds.own_program import OwnProgram
from tests.adapters.conftest import ROOT
from tests.adapters.trained import train
from tests.servers.process import running_server

SIDE = ROOT / "tests/adapters/verifiers_side"
PYTHON = ROOT / ".venv-verifiers/bin/python"
LEGACY_PYTHON = ROOT / ".venv-verifiers-0.3/bin/python"
START_S = 300.0
LIMITS = Limits(max_turns=8, max_context_tokens=8192, max_reply_tokens=256, tool_s=START_S, total_s=900.0)
# Of the tiny model a reply that nothing ends is as long as it may be; verifiers asks three times.
SMALL = (
    "scaffold.name=own_program",
    "rollout.concurrency=2",
    "rollout.limits.max_turns=4",
    "rollout.limits.max_context_tokens=512",
    "rollout.limits.max_reply_tokens=24",
    f"rollout.limits.tool_s={START_S}",
    "buffer.groups_per_step=1",
)


@pytest.fixture(autouse=True)
def _found_by_verifiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its Python has verifiers and the base of agentrl; our code and the tasksets of these tests it finds here."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / '.venv/packages'}:{SIDE}")


@pytest.fixture(scope="module")
def facts_url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of ours, which plays ``facts``: two questions, and whatever is said is an answer."""
    port = free_port()
    command = [sys.executable, "-m", "agentrl.cli.main", "env", "serve", "facts", "--port", str(port)]
    with running_server(command, port, tmp_path_factory.mktemp("server") / "log", START_S) as url:
        yield url


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with room for the schemas that the openenv taskset puts into each of its messages."""
    shape = TINY_SHAPE.model_copy(update={"context_tokens": 8192})
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "model", shape=shape)


class Reading(ScriptedEngine):
    """Lets a script read the text of the prompt, which comes as token ids alone."""

    async def generate(self, request: GenerationRequest) -> Generation:
        """The reply to that text."""
        text = self._chat.tokenizer.decode(request.prompt_ids.tolist())
        return await super().generate(replace(request, conversation=(Message(Role.USER, text),)))


def options(model: Path, **env: Any) -> dict[str, Any]:
    return {"env": env, "model": str(model), "renderer": "qwen3"}


def table(model: Path, traces: Path, env: str) -> str:
    """The recipe's tables of an environment that keeps verifiers' traces."""
    return (
        f'[environment]\nname = "verifiers"\ninterpreter = "{PYTHON}"\n'
        f'[environment.options]\nmodel = "{model}"\nrenderer = "qwen3"\ntraces = "{traces}"\n{env}'
    )


def trajectory_of(run: Path, episode: str) -> Trajectory:
    """An episode of the archive, which is one branch."""
    archived = {e.ticket.episode_id: e for file in (run / "episodes").glob("consumed-*") for e in read_consumed(file)}
    (trajectory,) = build_trajectories(archived[episode])
    return trajectory


def assert_same_tokens(run: Path, traces: Path, trained: Sequence[str]) -> None:
    """Each trained episode of the archive has the tokens, mask and log-probabilities of verifiers' one trace of it."""
    for name in trained:
        ours = trajectory_of(run, name)
        (trace,) = json.loads((traces / f"{name}.json").read_text())["traces"]
        ids, mask, logprobs = ([x for node in trace["nodes"] for x in node.get(field) or ()] for field in FIELDS)
        assert ids == ours.token_ids.tolist()
        assert mask == ours.sampled.tolist()
        assert np.asarray(logprobs, np.float32).tolist() == ours.logprobs[ours.sampled].tolist()


FIELDS = ("token_ids", "mask", "logprobs")


def test_episodes_of_a_taskset_are_trained_by_the_tokens_of_verifiers_traces(tiny_model, tmp_path):
    env = '[environment.options.env.taskset]\nid = "quiz"\n'
    done = train(tmp_path, tiny_model, table(tiny_model, tmp_path / "traces", env), *SMALL)
    assert {line["task"] for line in done.ledger} <= {f"verifiers/train/{ordinal}" for ordinal in range(7)}
    assert [line["turns"] for line in done.ledger] == [3] * len(done.ledger)
    for line in done.ledger:  # what verifiers scored, and the tests' own score of the length
        assert line["reward"] == pytest.approx(0.5 + line["sampled_tokens"] / 1000)
    assert_same_tokens(done.folder, tmp_path / "traces", [line["episode_id"] for line in done.ledger])


def test_its_openenv_taskset_is_trained_against_our_environment_server(facts_url, wide_model, tmp_path):
    env = (
        f'[environment.options.env.taskset]\nid = "openenv"\nbase_url = "{facts_url}"\n'
        "resets = [{ seed = 1 }, { seed = 2 }, { seed = 3 }]\n"
    )
    done = train(
        tmp_path,
        wide_model,
        table(wide_model, tmp_path / "traces", env),
        *SMALL,
        "rollout.limits.max_context_tokens=8192",
    )
    assert [line["turns"] for line in done.ledger] == [2] * len(done.ledger), "the server says when it is over"
    for line in done.ledger:  # no answer of a policy that knows nothing is right
        assert line["reward"] == pytest.approx(line["sampled_tokens"] / 1000)
    assert_same_tokens(done.folder, tmp_path / "traces", [line["episode_id"] for line in done.ledger])


def test_episodes_of_an_environment_of_verifiers_0_3_are_trained_by_the_tokens_of_its_trajectories(
    tiny_model, tmp_path
):
    legacy = (
        f'[environment]\nname = "verifiers_v0"\ninterpreter = "{LEGACY_PYTHON}"\n[environment.options]\n'
        f'id = "legacy-count"\nmodel = "{tiny_model}"\nrenderer = "qwen3"\ntraces = "{tmp_path / "traces"}"\n'
    )
    done = train(tmp_path, tiny_model, legacy, *SMALL)
    assert [line["turns"] for line in done.ledger] == [3] * len(done.ledger)
    for line in done.ledger:
        assert line["reward"] == pytest.approx(0.5 + line["sampled_tokens"] / 1000)
        ours = trajectory_of(done.folder, line["episode_id"])
        turns = json.loads((tmp_path / "traces" / f"{line['episode_id']}.json").read_text())["trajectory"]
        assert turns[-1]["prompt_ids"] + turns[-1]["completion_ids"] == ours.token_ids.tolist()
        logprobs = [logprob for turn in turns for logprob in turn["completion_logprobs"]]
        assert np.asarray(logprobs, np.float32).tolist() == ours.logprobs[ours.sampled].tolist()


async def test_its_openenv_taskset_plays_an_episode_to_its_end_on_our_environment_server(
    facts_url, wide_model, tmp_path
):
    def script(session: str, messages: Sequence[Message]) -> Message:
        answer = {"tool_name": "reply", "arguments": {"content": found(messages[0].content)}}
        return Message(Role.ASSISTANT, json.dumps(answer))

    env = {"taskset": {"id": "openenv", "base_url": facts_url, "resets": [{"seed": 1}]}}
    episode = await play(wide_model, script, tmp_path, env)
    assert (episode.failure, episode.stop_reason, len(episode.turns)) == (None, StopReason.ANSWERED, 2)
    (record,) = episode.scores
    assert record.score is not None
    assert (record.score.reward, record.score.metrics["reward_openenv_reward"]) == (1.0, 1.0)


def found(text: str) -> str:
    """The answer to a prompt's last question, by the facts that the prompt tells."""
    numbers = dict(re.findall(r"(\w+) has (\d+) \w+\.", text))
    person, number = re.findall(r"How many \w+ does (\w+) have|Who has (\d+)", text)[-1]
    return numbers[person] if person else next(name for name, has in numbers.items() if has == number)


async def test_an_episode_that_fails_in_verifiers_fails_by_the_error_that_it_names(facts_url, wide_model, tmp_path):
    """The server refuses the action, at which the openenv taskset raises."""
    env = {"taskset": {"id": "openenv", "base_url": facts_url, "resets": [{"seed": 1}]}}
    episode = await play(
        wide_model, lambda session, messages: Message(Role.ASSISTANT, '{"type": "nonsense"}'), tmp_path, env
    )
    assert episode.failure is not None
    assert str(episode.failure.boundary) == "environment"
    assert "EnvError: OpenEnvEnv.run()" in episode.failure.message


async def play(model: Path, script: Callable[..., Message], folder: Path, env: dict[str, Any]) -> Episode:
    """One episode by a scripted policy, verifiers in a process of its own."""
    chat, gateway = tiny_chat(model), LazyGateway()
    config = EnvironmentConfig(name="verifiers", options=options(model, **env), interpreter=PYTHON)
    host = await build_host(config, LIMITS.tool_s, folder)
    players = {"main": Player("main", Reading(chat, script), chat, Sampling())}
    verifier, journal = Verifier(LIMITS.tool_s), RecordingJournal()
    runner = EpisodeRunner(players, OwnProgram(800.0), host, verifier, journal, LIMITS, gateway)
    (task,) = await host.sample(Split.TRAIN, 0, [0])

    async def nothing() -> None:
        return

    try:
        return await runner.run(runner.open(replace(build_ticket(), task=task)), nothing)
    finally:
        await gateway.close()
        await host.close()


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"taskset": {"id": "no-such"}}, r"taskset 'no-such' not found.*harbor, nemo_gym, openenv, textarena"),
        ({"taskset": {"id": "openenv"}}, "pass `env` or `base_url`"),
        ({"taskset": {"id": "quiz"}, "player": {"retries": {"max_retries": 2}}}, r"options\.env\.player\.retries"),
        ({}, r"set options\.env\.taskset\.id"),
    ],
    ids=["unknown", "its options", "retries", "none"],
)
async def test_options_that_verifiers_cannot_take_are_named(tiny_model, tmp_path, env, said):
    config = EnvironmentConfig(name="verifiers", options=options(tiny_model, **env), interpreter=PYTHON)
    with pytest.raises(ConfigError, match=said):
        await build_host(config, START_S, tmp_path)


async def test_a_task_that_is_not_there_and_a_held_out_task_of_too_small_a_taskset_are_named(tiny_model, tmp_path):
    config = EnvironmentConfig(name="verifiers", interpreter=PYTHON)
    given = options(tiny_model, taskset={"id": "quiz"})
    host = await build_host(config.model_copy(update={"options": given}), START_S, tmp_path)
    assert host.description.num_tasks == 7
    train, heldout = await host.sample(Split.TRAIN, 0, range(7)), await host.sample(Split.HELDOUT, 7, [0])
    assert sorted(task.payload["index"] for task in train) == [0, 1, 2, 3, 5, 6, 7]
    assert [task.payload["index"] for task in heldout] == [4]
    gone = replace(train[0], payload={**train[0].payload, "index": 8})
    with pytest.raises(EpisodeError, match="taskset quiz has 8 tasks, and none of index 8"):
        async with host.open(gone):
            pass
    await host.close()
    given["heldout_every"] = 9
    host = await build_host(config.model_copy(update={"options": given}), START_S, tmp_path)
    with pytest.raises(EpisodeError, match=r"8 tasks, and one of 9 is held out.*set options\.heldout_every to 8"):
        await host.sample(Split.HELDOUT, 0, [0])
    await host.close()
