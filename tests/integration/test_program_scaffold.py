"""A program plays an episode: in a real sandbox, against the real gateway, with a scripted policy behind it."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.envs.inline import InlineHost
from agentrl.gateway.starting import LazyGateway
from agentrl.journal.reading import read_journal
from agentrl.journal.writer import JournalWriter
from agentrl.orchestration.players import build_scaffold
from agentrl.orchestration.transcripts import Teacher
from agentrl.orchestration.warmstart_config import load_warmstart_config
from agentrl.protocols import Engine
from agentrl.rollouts.episode_log import EpisodeJournal, EpisodeParked
from agentrl.rollouts.runner import EpisodeRunner, Player
from agentrl.scorers.verifier import Verifier
from agentrl.testing.builders import build_ticket
from agentrl.testing.recording_journal import RecordingJournal
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.sole_holder import SoleHolder
from agentrl.testing.tiny import tiny_chat
from agentrl.tokens.chat import ChatFormat
from agentrl.types.episode import Episode, StopReason
from agentrl.types.errors import Boundary, ConfigError
from agentrl.types.generation import Sampling
from agentrl.types.message import Message, Role, ToolCall
from agentrl.types.task import Limits, Split, Task
from agentrl.types.trajectory import build_trajectories
from agentrl_environments.terminal import definition
from agentrl_environments.terminal.agent import SYSTEM
from agentrl_environments.terminal.tasks import TerminalOptions, build_problem
from agentrl_scaffolds.program import Program
from tests.integration.sandbox_hosts import keeper
from tests.storms.escape_targets import running_with

pytestmark = pytest.mark.timeout(300)
LIMITS = Limits(max_turns=8, max_context_tokens=8192, max_reply_tokens=256, tool_s=60.0, total_s=240.0)
# An agent of a few lines that knows nothing but the protocol: it runs what the model says, until that is silent.
AGENT = """
import json, os, subprocess, sys, urllib.request
messages = [{"role": "user", "content": sys.argv[1]}]
tool = {"type": "function", "function": {"name": "shell", "parameters": {"type": "object"}}}
while True:
    body = json.dumps({"model": "main", "messages": messages, "tools": [tool], "temperature": 0.2}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    reply = json.load(urllib.request.urlopen(request, timeout=200))["choices"][0]["message"]
    messages.append(reply)
    if not reply.get("tool_calls"):
        break
    for call in reply["tool_calls"]:
        done = subprocess.run(json.loads(call["function"]["arguments"])["command"], shell=True, capture_output=True)
        messages.append({"role": "tool", "tool_call_id": call["id"], "content": (done.stdout + done.stderr).decode()})
print(reply["content"])
"""


@pytest.fixture(scope="module")
def chat(tiny_model: Path) -> ChatFormat:
    return tiny_chat(tiny_model)


def scripted(chat: ChatFormat, *commands: str, answer: str = "done") -> Engine:
    def script(session: str, messages: Sequence[Message]) -> Message:
        said = sum(message.role is Role.ASSISTANT for message in messages)
        if said < len(commands):
            return Message(Role.ASSISTANT, "", (ToolCall("", "shell", {"command": commands[said]}),))
        return Message(Role.ASSISTANT, answer)

    return ScriptedEngine(chat, script)


async def play(chat: ChatFormat, engine: Engine, scaffold: Program, journal: EpisodeJournal | None = None) -> Episode:
    """One episode of the terminal in a sandbox of bubblewrap."""
    gateway = LazyGateway()
    task = Task("terminal", Split.TRAIN, 0, {"seed": 3})
    host = InlineHost(definition, TerminalOptions(), LIMITS.tool_s)
    runner = EpisodeRunner(
        {"main": Player("main", engine, chat, Sampling())},
        scaffold,
        host,
        Verifier(LIMITS.tool_s),
        journal or RecordingJournal(),
        LIMITS,
        gateway,
    )

    async def nothing() -> None:
        return

    async with keeper("bwrap"):
        try:
            return await runner.run(runner.open(replace(build_ticket(), task=task)), nothing)
        finally:
            await gateway.close()


def agent(source: str = AGENT, **options: Any) -> Program:
    return Program(["python3", "-I", "-c", source, "{prompt}"], **options)


async def test_a_program_acts_in_the_sandbox_and_every_reply_is_the_policys(chat: ChatFormat) -> None:
    episode = await play(chat, scripted(chat, "echo found > there; ls", "cat there"), agent())
    assert episode.failure is None, episode.failure
    (trajectory,) = build_trajectories(episode)
    text = chat.tokenizer.decode(trajectory.token_ids.tolist())
    assert "there" in text
    assert "found" in text.rpartition("cat there")[2]
    assert (len(episode.turns), episode.stop_reason) == (3, StopReason.ANSWERED)
    assert episode.reward == 0.0
    assert (episode.counts["calls"], episode.counts["overrides_temperature"], episode.counts["programs"]) == (3, 3, 1)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("print('I need no model')", "I need no model"),
        ("import sys; sys.exit('no such option')", "exit code 1"),
        ("import os, urllib.request; urllib.request.urlopen(os.environ['AGENTRL_GATEWAY'] + '/v1/complete')", "404"),
    ],
    ids=["no call", "crash", "another dialect"],
)
async def test_a_program_without_a_reply_is_a_failed_episode_that_shows_what_it_said(
    chat: ChatFormat, source: str, said: str
) -> None:
    episode = await play(chat, scripted(chat), agent(source))
    assert episode.failure is not None
    assert (episode.failure.boundary, episode.failure.kind) == (Boundary.SCAFFOLD, "no_calls")
    assert said in episode.failure.message


async def test_a_program_that_never_stops_calling_is_stopped_and_judged_by_what_it_left(chat: ChatFormat) -> None:
    endless = scripted(chat, *["echo again"] * 100)
    episode = await play(chat, endless, agent(AGENT + "\nimport time; time.sleep(1000)"))
    assert (episode.failure, episode.stop_reason, len(episode.turns)) == (None, StopReason.MAX_TURNS, 8)
    assert episode.reward == 0.0


async def test_a_program_that_outlives_its_time_is_judged_by_what_it_left(chat: ChatFormat) -> None:
    source = AGENT.replace("        break", "        import time; time.sleep(1000)")
    episode = await play(chat, scripted(chat), agent(source, timeout_s=15.0))
    assert (episode.failure, len(episode.turns), episode.reward) == (None, 1, 0.0)
    assert episode.counts["programs_failed"] == 1


async def test_an_expert_plays_through_a_program_and_its_episodes_have_the_prompts_of_that(chat: ChatFormat) -> None:
    options = TerminalOptions(isolated=False)
    host = InlineHost(definition, options, LIMITS.tool_s)
    recipe = Path(__file__).parents[2] / "environments" / "terminal" / "program-warmstart.toml"
    shipped = build_scaffold(load_warmstart_config(recipe, []).scaffold)
    teacher = Teacher(definition, options, host, shipped, LIMITS)
    async with keeper("local"):
        episodes = await teacher.play("expert", chat, range(6), seed=0)
    assert not any(name.startswith("overrides") for e in episodes for name in e.counts)
    assert {(e.reward, e.stop_reason, len(e.turns)) for e in episodes} == {(1.0, StopReason.ANSWERED, 3)}
    for episode in episodes:
        (trajectory,) = build_trajectories(episode)
        text = chat.tokenizer.decode(trajectory.token_ids.tolist())
        problem = build_problem(options, episode.ticket.task.payload["seed"], Split.TRAIN)
        assert (text.count(SYSTEM), text.count(problem.prompt)) == (1, 1)


async def test_a_worker_that_is_to_stop_waits_for_no_program(chat: ChatFormat, tmp_path: Path) -> None:
    writer = JournalWriter(tmp_path, "worker")
    journal = SoleHolder(writer)
    idle = Program(["python3", "-I", "-c", AGENT + "\nimport time; time.sleep(1000)", "{prompt}", "mark-5417"])
    playing = asyncio.create_task(play(chat, scripted(chat), idle, journal))
    async with asyncio.timeout(200):
        while not read_journal(tmp_path).lives or not next(iter(read_journal(tmp_path).lives.values())).turns:
            await asyncio.sleep(0.05)
    assert running_with("mark-5417")
    journal.park()
    with pytest.raises(EpisodeParked):
        await playing
    assert not running_with("mark-5417")
    await writer.close()


async def test_files_of_the_programs_home_and_its_environment_are_filled_in(chat: ChatFormat) -> None:
    source = "import os; print(open(os.path.expanduser('~/.agent/settings')).read(), os.environ['WHO'])"
    files = {".agent/settings": "key={key}"}
    program = Program(
        ["python3", "-I", "-c", source + "; raise SystemExit(3)"], environment={"WHO": "{model}"}, home_files=files
    )
    episode = await play(chat, scripted(chat), program)
    assert episode.failure is not None
    assert "key=agentrl-" in episode.failure.message
    assert "main" in episode.failure.message.rpartition("key=")[2]


async def test_copied_files_come_as_they_are(chat: ChatFormat, tmp_path: Path) -> None:
    text = "said = f'{key}'\n\tquote: \"é\" $HOME `ls` \\n\n"
    (tmp_path / "mine").write_text(text)
    source = "import os, sys; print(repr(open(os.path.expanduser('~/tools/mine')).read())); sys.exit(3)"
    copied = {"tools/mine": str(tmp_path / "mine")}
    episode = await play(chat, scripted(chat), Program(["python3", "-c", source], copied_files=copied))
    assert episode.failure is not None
    assert repr(text) in episode.failure.message


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"command": "agent"}, "give its words as a list"),
        ({"command": []}, "give its words as a list"),
        ({"command": ["agent"], "copied_files": {"a": "/no/such/file"}}, "/no/such/file cannot be read"),
        ({"command": ["agent"], "copied_files": {"a": "no_such_package:file"}}, "no_such_package:file cannot be read"),
        ({"command": ["agent"], "copied_files": {"a": "os.no:file"}}, "os.no:file cannot be read"),
        ({"command": ["agent"], "copied_files": {"a": sys.executable}}, f"{sys.executable} cannot be read"),
        ({"command": ["agent"], "copied_files": {"a": "large"}}, "large has over 98304 bytes"),
    ],
)
def test_a_program_that_cannot_be_is_refused_when_it_is_made(
    fields: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("large").write_text("x" * 98305)
    with pytest.raises(ConfigError, match=said):
        Program(**fields)
