"""The textworld environment: hands commands to a generated game, and turns its score into a reward."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

from agentrl.types.environment import Opening, Score, StepResult
from agentrl.types.message import Message, Role
from agentrl.types.task import Task
from agentrl_environments.textworld.games import PACKAGE, TextWorldOptions, compiled_game

INSTRUCTION = (
    "You play a text adventure. Answer with one command, such as: go west, open door, take key from table, put key on "
    "shelf, unlock door with key, look, inventory."
)
_MAX_CHARACTERS = 100  # of a command; the interpreter reads into a buffer of fixed size
# Commands to the interpreter instead of the game: they write files, or undo what was scored.
_NOT_OF_THE_GAME = frozenset(
    "quit q restart restore save undo script transcript noscript unscript verify version notify restrict tw".split()
)
_STATUS_LINE = re.compile(r"\s*>\s*(?:-=.*=-\s*-?\d+/-?\d+)?\s*$")
_EMPTY_LINES = re.compile(r"\n[ \t]*\n(?:[ \t]*\n)+")


class TextWorldEnvironment:
    """One game; the reward is the share of its points that were scored when the episode ends.

    The last line of a reply is the command.

    Example: of a game of two points, one quest done is 0.5.
    """

    def __init__(self, options: TextWorldOptions, task: Task) -> None:
        self._options = options
        self._num_commands = 0
        textworld = PACKAGE.load("textworld", options)
        infos = textworld.EnvInfos(
            objective=True, admissible_commands=options.shows_commands, score=True, max_score=True, won=True
        )
        self._game: Any = textworld.start(str(compiled_game(options, task.payload["seed"])), infos)
        self._state: Any = None

    async def start(self) -> Opening:
        """Begin the game; its title is left out."""
        self._state = self._game.reset()
        told: str = self._state.feedback
        text = cleaned(told[max(told.find(self._state.objective), 0) :])
        return Opening((Message(Role.USER, f"{INSTRUCTION}\n\n{self._with_commands(text)}"),))

    async def step(self, action: Message) -> StepResult:
        """Carry out the command."""
        if action.tool_calls:
            said = "There are no tools here; write the command as text."
            return StepResult(tuple(Message(Role.TOOL, said, tool_call_id=c.id) for c in action.tool_calls))
        command = command_of(action.content)
        if command is None:
            return StepResult((Message(Role.USER, "That is no command of the game."),))
        self._num_commands += 1
        self._state, _, is_over = self._game.step(command)
        text = cleaned(self._state.feedback)
        return StepResult((Message(Role.USER, text if is_over else self._with_commands(text)),), is_done=bool(is_over))

    async def score(self) -> Score:
        """The points over all that there are."""
        if self._state is None:
            return Score(0.0, {"commands": 0.0, "won": 0.0})
        reward = float(self._state.score) / float(self._state.max_score)
        return Score(reward, {"commands": float(self._num_commands), "won": float(self._state.won)})

    async def close(self) -> None:
        """End the interpreter."""
        self._game.close()

    def _with_commands(self, text: str) -> str:
        if not self._options.shows_commands:
            return text
        return f"{text}\n\nPossible commands: {', '.join(self._state.admissible_commands)}."


def command_of(reply: str) -> str | None:
    """The last line of a reply, as far as the interpreter can read it; None if that is no command of the game."""
    lines = [line.strip() for line in reply.splitlines() if line.strip()]
    command = "".join(character for character in (lines or [""])[-1] if " " <= character <= "~")[:_MAX_CHARACTERS]
    words = re.findall(r"[a-z]+", command.casefold())
    return command if words and not _NOT_OF_THE_GAME & set(words) else None


def cleaned(feedback: str) -> str:
    """What the game says, without prompt and status line."""
    return _EMPTY_LINES.sub("\n\n", _STATUS_LINE.sub("", feedback)).strip()


def act_by_walkthrough(
    options: TextWorldOptions, task: Task, messages: Sequence[Message], rng: random.Random
) -> Message:
    """The next command of the game's own walk-through."""
    file = compiled_game(options, task.payload["seed"]).with_suffix(".json")
    commands = PACKAGE.load("textworld", options).Game.load(str(file)).metadata["walkthrough"]
    num_taken = sum(message.role is Role.ASSISTANT for message in messages)
    return Message(Role.ASSISTANT, commands[min(num_taken, len(commands) - 1)])
