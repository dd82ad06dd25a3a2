import pytest

from agentrl.envs.abilities import WholeEnvironment
from agentrl.envs.inline import InlineHost
from agentrl.envs.process import ProcessHost
from agentrl.envs.remote import RemoteEnvironment
from agentrl.envs.starting import WorkerCommand
from agentrl.testing.durable_environments import LastingOptions, SessionServer, enduring
from agentrl.testing.environments import FaultyEnvironment, FaultyOptions, faulty
from agentrl.types.errors import EpisodeError
from agentrl.types.sandbox import Command
from agentrl.types.task import Split, Task

TASK = Task("abilities", Split.TRAIN, 0)


async def test_what_an_environment_has_no_method_for_is_named_when_it_is_asked_for():
    environment = WholeEnvironment(FaultyEnvironment(FaultyOptions(), TASK))
    assert (await environment.start()).messages[0].content == "count"
    for call in (environment.handle(), environment.detach(), environment.outcome(0, ())):
        with pytest.raises(TypeError, match="FaultyEnvironment lacks handle, detach or outcome"):
            await call
    with pytest.raises(TypeError, match="FaultyEnvironment lacks snapshot"):
        await environment.snapshot()


async def test_a_program_without_a_sandbox_fails_the_episode_and_says_what_to_do(tmp_path):
    apart = ProcessHost(
        WorkerCommand("agentrl.testing.environments:faulty", {}, tmp_path), faulty.describe(FaultyOptions()), 60.0
    )
    async with InlineHost(faulty, FaultyOptions(), 60.0).open(TASK) as inline, apart.open(TASK) as process:
        for environment in (inline, process, RemoteEnvironment(None, "session", 0, 60.0)):
            for call in (environment.run(Command(("true",)), "program"), environment.stop("program")):
                with pytest.raises(EpisodeError, match="SandboxEnvironment") as caught:
                    await call
                assert (caught.value.failure.boundary, caught.value.failure.kind) == ("environment", "no_sandbox")
    await apart.close()


async def test_an_inline_host_passes_on_every_call_that_the_environment_has(tmp_path):
    server = SessionServer(tmp_path)
    async with InlineHost(enduring, LastingOptions(folder=tmp_path), 5.0).open(TASK) as environment:
        assert [await environment.handle()] == server.alive()
        assert await environment.outcome(0, ()) is None
        assert b"session-1" in await environment.snapshot()
        await environment.detach()
    assert server.alive() == ["session-1"]


def test_sessions_that_two_processes_begin_at_once_have_two_names(tmp_path):
    (tmp_path / "session-1.name").touch()  # another process has taken the name, and not told of it yet
    assert SessionServer(tmp_path).begin().name == "session-2"
