"""A judge behind HTTP that answers by a script: OpenAI's chat completions, on a port of its own."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, cast

_QUOTED = re.compile(
    r"^(?P<mark><<\w+>>) conversation before the turn\n(?P<before>.*)\n"
    r"(?P=mark) the turn to grade\n(?P<reply>.*)\n(?P=mark) end$",
    re.DOTALL | re.MULTILINE,
)
_TURN = re.compile(r"Its id is (?P<turn>\w+)\.$")


class JudgeFault(StrEnum):
    """What a judge does instead of an answer to what it was asked.

    PROSE: words and no JSON. WRONG_TURN: a verdict on another turn. NAN: a score that is no number. CUT: half a
    verdict, at the limit of tokens. EMPTY: a completion without text. NO_COMPLETION: a page of HTML. BUSY is status
    429, OVERLOADED 529, BROKEN 500, NO_KEY 401, NO_MODEL 404, REFUSED 400. HANG: no answer until the server ends.
    GONE: the connection ends without an answer.
    """

    PROSE = "prose"
    WRONG_TURN = "wrong_turn"
    NAN = "nan"
    CUT = "cut"
    EMPTY = "empty"
    NO_COMPLETION = "no_completion"
    BUSY = "busy"
    OVERLOADED = "overloaded"
    BROKEN = "broken"
    NO_KEY = "no_key"
    NO_MODEL = "no_model"
    REFUSED = "refused"
    HANG = "hang"
    GONE = "gone"


_STATUSES: dict[JudgeFault, int] = {
    JudgeFault.BUSY: HTTPStatus.TOO_MANY_REQUESTS,
    JudgeFault.OVERLOADED: 529,
    JudgeFault.BROKEN: HTTPStatus.INTERNAL_SERVER_ERROR,
    JudgeFault.NO_KEY: HTTPStatus.UNAUTHORIZED,
    JudgeFault.NO_MODEL: HTTPStatus.NOT_FOUND,
    JudgeFault.REFUSED: HTTPStatus.BAD_REQUEST,
}


@dataclass(frozen=True, slots=True)
class JudgeQuestion:
    """A request as the server got it; `before` and `reply` are what it quotes, `turn` is the id that it asks of."""

    body: dict[str, Any]
    key: str
    before: str
    reply: str
    turn: str


@dataclass(frozen=True, slots=True)
class JudgeScore:
    """A verdict in the form that is asked for: a score of the scale, and the model by which the server calls itself."""

    score: float
    reason: str = "as the script says"
    model: str = "scripted-judge-1"


JudgeScript = Callable[[JudgeQuestion], JudgeScore | JudgeFault]


class ScriptedJudge:
    """The server; `questions` has what it was asked, `url` is for clients. Each question has a thread of its own.

    Example: ``with scripted_judge(lambda question: JudgeScore(8.0)) as judge: ...``
    """

    def __init__(self, script: JudgeScript) -> None:
        self.script = script
        self.questions: list[JudgeQuestion] = []
        self.ended = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.daemon_threads = True
        cast(Any, self._server).judge = self
        self._thread = threading.Thread(target=self._server.serve_forever, name="scripted-judge", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Base address of its API."""
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def close(self) -> None:
        """Answer nobody any more; questions that hang end. Safe to call twice."""
        self.ended.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def scripted_judge(script: JudgeScript) -> Iterator[ScriptedJudge]:
    """A judge that answers within the block."""
    judge = ScriptedJudge(script)
    try:
        yield judge
    finally:
        judge.close()


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    protocol_version = "HTTP/1.1"
    # Headers and body are two writes, and the second would wait for an acknowledgement of the first.
    disable_nagle_algorithm = True

    def do_POST(self) -> None:
        """Answer a question by the script. Waits for: the end of the server, if it is to hang. Unblocked by: that."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/v1/chat/completions":
            self._send(HTTPStatus.NOT_FOUND, {"error": {"message": f"nothing at {self.path}"}})
            return
        judge = cast(ScriptedJudge, cast(Any, self.server).judge)
        question = _question(body, self.headers.get("Authorization", ""))
        judge.questions.append(question)
        said = judge.script(question)
        if isinstance(said, JudgeScore):
            self._complete(json.dumps({"turn": question.turn, "reason": said.reason, "score": said.score}), said.model)
        elif said in _STATUSES:
            self._send(_STATUSES[said], {"error": {"message": f"the script says {said}"}})
        else:
            self._fail(said, question, judge)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: what was asked is in `questions`."""

    def _fail(self, fault: JudgeFault, question: JudgeQuestion, judge: ScriptedJudge) -> None:
        match fault:
            case JudgeFault.PROSE:
                self._complete("Sure! The turn looks fine to me.")
            case JudgeFault.WRONG_TURN:
                self._complete(json.dumps({"turn": question.turn[::-1], "reason": "another", "score": 1}))
            case JudgeFault.NAN:
                self._complete(f'{{"turn": "{question.turn}", "reason": "lost", "score": NaN}}')
            case JudgeFault.CUT:
                self._complete(f'{{"turn": "{question.turn}", "rea', finish="length")
            case JudgeFault.EMPTY:
                self._complete(None)
            case JudgeFault.NO_COMPLETION:
                self._write(HTTPStatus.OK, b"<html>Welcome</html>", "text/html")
            case JudgeFault.HANG:
                judge.ended.wait()
                self.close_connection = True
            case _:
                self.close_connection = True

    def _complete(self, text: str | None, model: str = JudgeScore(0.0).model, finish: str = "stop") -> None:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "finish_reason": finish, "message": message}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model}
        self._send(HTTPStatus.OK, {**head, "choices": [choice], "usage": usage})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._write(status, json.dumps(body).encode(), "application/json")

    def _write(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _question(body: dict[str, Any], authorization: str) -> JudgeQuestion:
    text = body["messages"][-1]["content"]
    quoted, turn = _QUOTED.search(text), _TURN.search(text)
    key = authorization.removeprefix("Bearer ")
    if quoted is None or turn is None:
        return JudgeQuestion(body, key, "", text, "")
    return JudgeQuestion(body, key, quoted["before"], quoted["reply"], turn["turn"])
