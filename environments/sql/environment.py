"""The SQL environment: look at the schema, query, answer; right means equal to the executed reference."""

from __future__ import annotations

from agentrl.envs.authoring import ToolEnvironment, ToolError, tool, toolbox_of
from agentrl.types.environment import Score
from agentrl_environments.sql.database import Database, QueryError
from agentrl_environments.sql.tasks import SqlOptions, build_problem


class SqlEnvironment(ToolEnvironment[SqlOptions]):
    """One problem over one database.

    A wrong tool, wrong arguments and bad SQL are observations, not failures. An answer counts only if
    some query had succeeded before it: a guess is worth nothing.

    Example: calls ``schema``, then ``query {"sql": "SELECT MAX(net_cost) FROM east_stock"}``, then the
    message ``93`` scores 1.0.
    """

    def prepare(self) -> None:
        """Make the database, and the answer by the reference query."""
        self._problem = build_problem(self.options, self.task.payload["seed"], self.task.split)
        self._database = Database(self._problem, self.options)
        self._expected = str(self._database.run(self._problem.query)[0][0])
        self._num_queries = 0
        self._num_errors = 0

    def prompt(self) -> str:
        """The question."""
        return self._problem.question

    @tool
    def schema(self) -> str:
        """List the tables and their columns."""
        return f"{self._problem.table}(name, {', '.join(self._problem.columns)})"

    @tool
    def query(self, sql: str) -> str:
        """Run one SELECT and return its rows."""
        try:
            rows = self._database.run(sql)
        except QueryError as error:
            self._num_errors += 1
            raise ToolError(str(error)) from None
        self._num_queries += 1
        lines = [", ".join(str(value) for value in row) for row in rows[: self.options.max_result_rows]]
        if len(rows) > self.options.max_result_rows:
            lines.append("(more rows were cut)")
        return "\n".join(lines) or "no rows"

    def reward(self) -> Score:
        """1.0 for the right answer after a successful query, else 0.0."""
        is_right = self.answer is not None and _normalise(self.answer) == _normalise(self._expected)
        reward = float(is_right and self._num_queries > 0)
        return Score(reward, {"queries": float(self._num_queries), "query_errors": float(self._num_errors)})

    def free(self) -> None:
        """Free the database."""
        self._database.close()


TOOLS = toolbox_of(SqlEnvironment).specs


def _normalise(text: str) -> str:
    return text.strip().rstrip(".").casefold()
