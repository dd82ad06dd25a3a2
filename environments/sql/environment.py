"""The SQL environment: look at the schema, query, answer; right means equal to the executed reference."""

from __future__ import annotations

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role, ToolCall, ToolSpec
from agentrl.types.task import Task
from agentrl_environments.sql.database import Database, QueryError
from agentrl_environments.sql.tasks import SqlOptions, build_problem

SCHEMA_TOOL = ToolSpec("schema", "List the tables and their columns.")
QUERY_TOOL = ToolSpec(
    "query",
    "Run one SELECT and return its rows.",
    {"type": "object", "properties": {"sql": {"type": "string"}}, "required": ["sql"]},
)
TOOLS = (SCHEMA_TOOL, QUERY_TOOL)


class SqlEnvironment:
    """One problem over one database.

    A wrong tool, wrong arguments and bad SQL are observations, not failures. An answer counts only if
    some query had succeeded before it: a guess is worth nothing.

    Example: calls ``schema``, then ``query {"sql": "SELECT MAX(net_cost) FROM east_stock"}``, then the
    message ``93`` scores 1.0.
    """

    def __init__(self, options: SqlOptions, task: Task) -> None:
        self._problem = build_problem(options, task.payload["seed"], task.split)
        self._database = Database(self._problem, options)
        self._max_rows = options.max_result_rows
        self._expected = str(self._database.run(self._problem.query)[0][0])
        self._answer: str | None = None
        self._num_queries = 0
        self._num_errors = 0

    async def start(self) -> Opening:
        """Pose the question."""
        return Opening((Message(Role.USER, self._problem.question),), TOOLS)

    async def step(self, action: Message) -> StepResult:
        """Carry out the tool calls; a message without any is the answer and ends the episode."""
        if not action.tool_calls:
            self._answer = action.content
            return StepResult(is_done=True)
        replies = [Message(Role.TOOL, self._call(c), tool_call_id=c.id) for c in action.tool_calls]
        return StepResult(tuple(replies))

    async def score(self) -> Score:
        """1.0 for the right answer after a successful query, else 0.0."""
        is_right = self._answer is not None and _normalise(self._answer) == _normalise(self._expected)
        reward = float(is_right and self._num_queries > 0)
        return Score(reward, {"queries": float(self._num_queries), "query_errors": float(self._num_errors)})

    async def close(self) -> None:
        """Free the database."""
        self._database.close()

    def _call(self, call: ToolCall) -> str:
        if call.error is not None:
            return f"error: the tool call is malformed ({call.error})"
        if call.name == SCHEMA_TOOL.name:
            return f"{self._problem.table}(name, {', '.join(self._problem.columns)})"
        if call.name == QUERY_TOOL.name:
            return self._query(call.arguments.get("sql"))
        return f"error: no tool '{call.name}'; there are schema and query"

    def _query(self, sql: object) -> str:
        if not isinstance(sql, str):
            return "error: query needs the argument sql, a string"
        try:
            rows = self._database.run(sql)
        except QueryError as error:
            self._num_errors += 1
            return f"error: {error}"
        self._num_queries += 1
        lines = [", ".join(str(value) for value in row) for row in rows[: self._max_rows]]
        if len(rows) > self._max_rows:
            lines.append("(more rows were cut)")
        return "\n".join(lines) or "no rows"


def _normalise(text: str) -> str:
    return text.strip().rstrip(".").casefold()
