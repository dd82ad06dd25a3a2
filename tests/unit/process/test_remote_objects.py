from __future__ import annotations

import asyncio
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from served import Column

from agentrl.process.local_place import LocalPlace
from agentrl.process.remote import ChildProcess, ProcessDiedError, RemoteCallError
from agentrl.process.starting import tail
from agentrl.testing.pumped_place import PumpedPlace
from agentrl.types.task import Split, Task

SERVED = str(Path(__file__).with_name("served.py"))


@pytest.fixture(params=[LocalPlace, PumpedPlace])
async def caller(request, tmp_path):
    """An object on the other side of the border."""
    child = await ChildProcess.start("calculator", [SERVED], tmp_path / "calculator.log", place=request.param())
    yield child
    child.kill()


async def test_calls_and_records_cross_the_border_unchanged(caller):
    assert await caller.call("add", 2, 3, result=int, deadline_s=30) == 5
    column = await caller.call(
        "double", Column(np.asarray([[1.5, 2.5]], np.float32), "x"), result=Column, deadline_s=30
    )
    assert (column.values.tolist(), column.values.dtype, column.name) == ([[3.0, 5.0]], np.float32, "x")
    task = Task("sql", Split.TRAIN, 7, {"seed": "a", "deep": [1, {"b": None}]})
    renamed = await caller.call("rename", task, Split.HELDOUT, result=Task, deadline_s=30)
    assert renamed == Task("sql", Split.HELDOUT, 7, {"seed": "a", "deep": [1, {"b": None}]})
    assert await caller.call("count", result=int, deadline_s=30) == 1


async def test_what_a_method_raises_arrives_with_type_message_and_trace(caller):
    with pytest.raises(RemoteCallError, match=r"calculator\.fail: ValueError: seven is not allowed") as caught:
        await caller.call("fail", result=int, deadline_s=30)
    assert (caught.value.error, caught.value.failure) == ("ValueError", None)
    assert "raise ValueError" in caught.value.trace
    assert await caller.call("add", 1, 1, result=int, deadline_s=30) == 2


async def test_an_episodes_failure_keeps_its_boundary_and_kind(caller):
    with pytest.raises(RemoteCallError) as caught:
        await caller.call("fail_episode", result=int, deadline_s=30)
    assert str(caught.value.failure) == "environment(reward): reward is nan"


@pytest.mark.parametrize(
    ("method", "arguments", "error"),
    [
        ("_secret", (), "AttributeError"),
        ("nothing", (), "AttributeError"),
        ("add", (1,), "ValueError"),
        ("add", (1, "two"), "ValidationError"),
    ],
)
async def test_a_call_that_does_not_fit_is_refused_on_the_other_side(caller, method, arguments, error):
    with pytest.raises(RemoteCallError) as caught:
        await caller.call(method, *arguments, result=int, deadline_s=30)
    assert caught.value.error == error


async def test_an_answer_of_another_type_is_an_error_at_the_border(caller):
    with pytest.raises(msgspec.ValidationError):
        await caller.call("add", 1, 2, result=str, deadline_s=30)


async def test_a_child_that_ends_is_reported_with_its_code_and_last_words(tmp_path):
    child = await ChildProcess.start("calculator", [SERVED], tmp_path / "calculator.log")
    log = re.escape(str(tmp_path / "calculator.log"))
    with pytest.raises(ProcessDiedError, match=rf"ended \(exit code 7\) during die; end of {log}:\n    last words"):
        await child.call("die", result=int, deadline_s=30)
    assert not child.is_alive
    with pytest.raises(ProcessDiedError):
        await child.call("add", 1, 2, result=int, deadline_s=30)
    child.kill()
    child.kill()


async def test_a_call_that_blocks_ends_by_its_deadline_and_the_child_can_be_killed(tmp_path):
    child = await ChildProcess.start("calculator", [SERVED], tmp_path / "calculator.log")
    assert await child.call("add", 1, 2, result=int, deadline_s=30) == 3
    with pytest.raises(TimeoutError):
        await child.call("block", result=int, deadline_s=0.05)
    assert child.is_alive
    child.kill()
    assert not child.is_alive


async def test_the_answer_to_a_call_that_was_given_up_is_nobody_elses(caller, tmp_path):
    begun, may_end = tmp_path / "begun", tmp_path / "may end"
    given_up = asyncio.create_task(caller.call("wait", str(begun), str(may_end), result=int, deadline_s=120))
    while not begun.exists():
        await asyncio.sleep(0.01)
    given_up.cancel()
    await asyncio.wait([given_up])
    adding = asyncio.create_task(caller.call("add", 2, 3, result=int, deadline_s=120))
    await asyncio.sleep(0)
    may_end.touch()
    assert await adding == 5
    assert await caller.call("add", 3, 3, result=int, deadline_s=120) == 6


async def test_a_call_that_is_given_up_in_the_middle_of_its_answer_leaves_the_rest_to_nobody(caller):
    large = Column(np.zeros(2_000_000), "large")
    given_up = asyncio.create_task(caller.call("double", large, result=Column, deadline_s=120))
    while caller._coming is None and not given_up.done():
        await asyncio.sleep(0)
    given_up.cancel()
    await asyncio.wait([given_up])
    assert await caller.call("add", 2, 3, result=int, deadline_s=120) == 5


async def test_a_call_beside_another_is_carried_out_before_that_has_ended(caller, tmp_path):
    holding = asyncio.create_task(caller.call("hold", str(tmp_path / "begun"), result=str, deadline_s=300))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    await caller.tell("let_go", "x" * 200_000, deadline_s=300)
    assert await holding == "x" * 200_000
    assert await caller.call("count", result=int, deadline_s=300) == 1
    # What it raises, since nothing is held, is nobody's either.
    await caller.tell("let_go", "again", deadline_s=300)
    assert await caller.call("add", 2, 3, result=int, deadline_s=300) == 5


async def test_a_call_that_is_not_to_be_carried_out_beside_another_waits_for_its_end(caller, tmp_path):
    given_up = asyncio.create_task(caller.call("hold", str(tmp_path / "begun"), result=str, deadline_s=300))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.01)
    given_up.cancel()
    await asyncio.wait([given_up])
    counting = asyncio.create_task(caller.call("count", result=int, deadline_s=300))
    await asyncio.sleep(0)
    await caller.tell("let_go", "late", deadline_s=300)
    assert await counting == 1, "it was answered before the call that was given up had ended"


async def test_a_child_that_is_gone_is_told_nothing(tmp_path):
    child = await ChildProcess.start("calculator", [SERVED], tmp_path / "calculator.log")
    child.kill()
    await child.tell("let_go", "late", deadline_s=300)


async def test_close_lets_a_child_end_by_itself(tmp_path):
    child = await ChildProcess.start("calculator", [SERVED], tmp_path / "calculator.log")
    assert await child.call("count", result=int, deadline_s=30) == 0
    await child.close(grace_s=30)
    assert child._process.returncode == 0
    await child.close()


def test_the_end_of_a_log_reads_even_if_there_is_none(tmp_path):
    assert tail(tmp_path / "none.log") == "    (no log)"
    log = tmp_path / "log"
    log.write_text("")
    assert tail(log) == "    (log is empty)"
    log.write_bytes(b"one\ntwo\n\xffthree\n")
    assert tail(log, 2) == "    two\n    \ufffdthree"
