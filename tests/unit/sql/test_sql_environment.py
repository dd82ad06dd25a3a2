from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest

from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Split
from agentrl_environments.sql import database as sql_database
from agentrl_environments.sql.database import Database, QueryError
from agentrl_environments.sql.environment import SqlEnvironment
from agentrl_environments.sql.tasks import SqlOptions, build_problem, sample_task

OPTIONS = SqlOptions()
TASK = sample_task(OPTIONS, Split.TRAIN, 3, 0)
PROBLEM = build_problem(OPTIONS, TASK.payload["seed"], Split.TRAIN)
ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT COUNT(*) FROM c"


def right_answer() -> str:
    return str(Database(PROBLEM, OPTIONS).run(PROBLEM.query)[0][0])


async def observe(environment: SqlEnvironment, name: str, **arguments) -> str:
    result = await environment.step(Message(Role.ASSISTANT, "", (ToolCall("c", name, arguments),)))
    [message] = result.messages
    assert (message.role, message.tool_call_id, result.is_done) == (Role.TOOL, "c", False)
    return message.content


async def judge(environment: SqlEnvironment, answer: str) -> float | None:
    assert (await environment.step(Message(Role.ASSISTANT, answer))).is_done
    return (await environment.score()).reward


async def test_looking_querying_and_answering_scores_one():
    environment = SqlEnvironment(OPTIONS, TASK)
    assert (await environment.start()).messages[0].content == PROBLEM.question
    assert await observe(environment, "schema") == f"{PROBLEM.table}(name, {', '.join(PROBLEM.columns)})"
    assert await observe(environment, "query", sql=PROBLEM.query) == right_answer()
    assert await judge(environment, f" {right_answer().upper()}. ") == 1.0
    await environment.close()
    await environment.close()


async def test_its_tools_are_told_as_they_always_were():
    """A policy that was trained has read these very words."""
    schema, query = (await SqlEnvironment(OPTIONS, TASK).start()).tools
    assert schema == ToolSpec("schema", "List the tables and their columns.", {"type": "object", "properties": {}})
    parameters = {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]}
    assert query == ToolSpec("query", "Run one SELECT and return its rows.", parameters)
    assert list(query.parameters) == list(parameters)


async def test_the_right_answer_without_any_query_scores_nothing():
    assert await judge(SqlEnvironment(OPTIONS, TASK), right_answer()) == 0.0


async def test_a_query_that_failed_does_not_count_as_a_query():
    environment = SqlEnvironment(OPTIONS, TASK)
    await observe(environment, "query", sql="SELECT x FROM nowhere")
    assert await judge(environment, right_answer()) == 0.0
    assert (await environment.score()).metrics == {"queries": 0.0, "query_errors": 1.0}


async def test_a_wrong_answer_after_the_right_query_scores_nothing():
    environment = SqlEnvironment(OPTIONS, TASK)
    await observe(environment, "query", sql=PROBLEM.query)
    assert await judge(environment, right_answer() + "0") == 0.0


async def test_an_episode_that_never_answered_scores_nothing():
    assert (await SqlEnvironment(OPTIONS, TASK).score()).reward == 0.0


@pytest.mark.parametrize(
    ("sql", "observation"),
    [
        ("SELECT x FROM nowhere", "error: no such table: nowhere"),
        ("SELEC 1", 'error: near "SELEC": syntax error'),
        ("", "no rows"),
        ("SELECT 1; SELECT 2", "error: You can only execute one statement at a time."),
        ("SELECT '\0'", "error: "),
        ("SELECT '\ud800'", "error: "),
        ("SELECT 1 WHERE 0", "no rows"),
        ("SELECT randomblob(100000)", "error: string or blob too big"),
        ("SELECT CAST(x'ff' AS TEXT)", "error: Could not decode to UTF-8"),
    ],
)
async def test_bad_sql_is_an_observation(sql, observation):
    assert (await observe(SqlEnvironment(OPTIONS, TASK), "query", sql=sql)).startswith(observation)


@pytest.mark.parametrize(
    "sql",
    [
        f"DROP TABLE {PROBLEM.table}",
        f"DELETE FROM {PROBLEM.table}",
        f"UPDATE {PROBLEM.table} SET name = 'ada'",
        f"INSERT INTO {PROBLEM.table} (name) VALUES ('zed')",
        "CREATE TABLE t (x)",
        "ATTACH DATABASE '/tmp/x.db' AS x",
        "PRAGMA writable_schema = 1",
        "BEGIN",
    ],
)
async def test_whatever_is_not_a_select_is_refused_and_changes_nothing(sql):
    environment = SqlEnvironment(OPTIONS, TASK)
    before = await observe(environment, "query", sql=f"SELECT * FROM {PROBLEM.table}")
    assert await observe(environment, "query", sql=sql) == "error: only SELECT is allowed"
    assert await observe(environment, "query", sql=f"SELECT * FROM {PROBLEM.table}") == before


def test_a_query_that_never_ends_is_stopped_after_its_time(monkeypatch):
    looks = itertools.count()  # at the clock, 0.02 s apart
    monkeypatch.setattr(sql_database, "time", SimpleNamespace(monotonic=lambda: 0.02 * next(looks)))
    database = Database(PROBLEM, SqlOptions(query_s=0.05))
    with pytest.raises(QueryError, match=r"query stopped after 0\.05 s"):
        database.run(ENDLESS)
    assert next(looks) <= 6
    assert database.run("SELECT 1") == [(1,)]


async def test_rows_beyond_the_limit_are_cut_and_the_cut_is_named():
    environment = SqlEnvironment(SqlOptions(max_result_rows=2), TASK)
    names = [str(row[0]) for row in PROBLEM.rows]
    query = f"SELECT name FROM {PROBLEM.table}"
    assert await observe(environment, "query", sql=query) == f"{names[0]}\n{names[1]}\n(more rows were cut)"
    assert await observe(environment, "query", sql=f"{query} LIMIT 2") == f"{names[0]}\n{names[1]}"


async def test_wrong_tools_and_arguments_are_observations():
    environment = SqlEnvironment(OPTIONS, TASK)
    assert await observe(environment, "delete") == "error: no tool 'delete'; there are schema, query"
    missing = "error: query: argument sql is missing; its arguments are sql"
    assert await observe(environment, "query") == missing
    wrong = "error: query: sql: Input should be a valid string (got 3); its arguments are sql"
    assert await observe(environment, "query", sql=3) == wrong
    malformed = Message(Role.ASSISTANT, "", (ToolCall("c", "query", {}, error="invalid_json"),))
    [message] = (await environment.step(malformed)).messages
    assert message.content == "error: the tool call is malformed (invalid_json)"


async def test_every_call_of_a_message_has_its_answer_in_order():
    calls = (ToolCall("a", "query", {"sql": "SELECT 1"}), ToolCall("b", "schema"), ToolCall("c", "nothing"))
    result = await SqlEnvironment(OPTIONS, TASK).step(Message(Role.ASSISTANT, "both", calls))
    assert [message.tool_call_id for message in result.messages] == ["a", "b", "c"]
    assert result.messages[0].content == "1"
