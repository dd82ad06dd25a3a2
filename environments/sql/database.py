"""A real SQLite database that can only be read, within limits of time, rows and size."""

from __future__ import annotations

import sqlite3
import time

from agentrl_environments.sql.tasks import Problem, SqlOptions

_ALLOWED = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_INSTRUCTIONS_PER_CHECK = 1000
_MAX_VALUE_BYTES = 10_000


class QueryError(Exception):
    """A query that cannot be answered; the message is for the one who wrote it."""


class Database:
    """One problem's table in memory; every statement but SELECT is refused by SQLite's authorizer.

    Example: ``Database(problem, options).run("SELECT 1")`` gives ``[(1,)]``.
    """

    def __init__(self, problem: Problem, options: SqlOptions) -> None:
        self._options = options
        self._stop_at = float("inf")
        columns = ", ".join(f"{column} INTEGER" for column in problem.columns)
        self._connection = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._connection.execute(f"CREATE TABLE {problem.table} (name TEXT, {columns})")
        marks = ", ".join("?" * (1 + len(problem.columns)))
        self._connection.executemany(f"INSERT INTO {problem.table} VALUES ({marks})", problem.rows)
        self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)
        self._connection.set_authorizer(_authorize)
        self._connection.set_progress_handler(self._is_over_time, _INSTRUCTIONS_PER_CHECK)

    def run(self, sql: str) -> list[tuple[object, ...]]:
        """Rows of one SELECT, one more than may be shown so that a cut can be told.

        Raises:
            QueryError: bad SQL, not a SELECT, or over the time limit.
        """
        self._stop_at = time.monotonic() + self._options.query_s
        try:
            return self._connection.execute(sql).fetchmany(self._options.max_result_rows + 1)
        except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError) as error:
            raise QueryError(self._explain(error)) from error

    def close(self) -> None:
        """Free the database; safe to call twice."""
        self._connection.close()

    def _is_over_time(self) -> int:
        return int(time.monotonic() > self._stop_at)

    def _explain(self, error: Exception) -> str:
        if str(error) == "interrupted":
            return f"query stopped after {self._options.query_s:g} s"
        if str(error) == "not authorized":
            return "only SELECT is allowed"
        return str(error)


def _authorize(action: int, *_details: object) -> int:
    return sqlite3.SQLITE_OK if action in _ALLOWED else sqlite3.SQLITE_DENY
