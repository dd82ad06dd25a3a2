from __future__ import annotations

from agentrl.types.environment import Opening, StepResult
from agentrl.types.message import Message, Role
from agentrl_scaffolds.turn_taking import TurnTaking


def told(text: str) -> tuple[Message, ...]:
    return (Message(Role.USER, text),)


class Table:
    """A context whose agents reply with their name and how often they have spoken; it notes what each is told."""

    def __init__(self, opening: Opening, results: list[StepResult]) -> None:
        self.agents = ("white", "black")
        self._opening, self._results = opening, results
        self.heard: list[tuple[str, str]] = []
        self.acted: list[str] = []

    async def start(self) -> Opening:
        return self._opening

    def agent(self, name: str) -> Seat:
        return Seat(name, self.heard)

    async def step(self, action: Message) -> StepResult:
        self.acted.append(action.content)
        return self._results.pop(0)


class Seat:
    def __init__(self, name: str, heard: list[tuple[str, str]]) -> None:
        self._name, self._heard = name, heard

    async def generate(self, messages: tuple[Message, ...], tools: tuple = ()) -> Message:
        self._heard += [(self._name, message.content) for message in messages]
        return Message(Role.ASSISTANT, f"{self._name} {len([n for n, _ in self._heard if n == self._name])}")

    async def rewrite(self, messages: tuple[Message, ...], tools: tuple = ()) -> Message:
        self._heard += [(self._name, message.content) for message in messages]
        return Message(Role.ASSISTANT, f"{self._name} anew")


async def test_the_agent_that_the_environment_names_is_told_and_acts_next():
    results = [StepResult(told("b"), agent="white"), StepResult(told("c"), agent="black"), StepResult(is_done=True)]
    table = Table(Opening(told("a"), agent="black"), results)
    await TurnTaking().run(table)
    assert table.heard == [("black", "a"), ("white", "b"), ("black", "c")]
    assert table.acted == ["black 1", "white 1", "black 2"]


async def test_where_nobody_is_named_the_first_agent_begins_and_whoever_acted_goes_on():
    table = Table(Opening(told("a")), [StepResult(told("b")), StepResult(is_done=True)])
    await TurnTaking().run(table)
    assert table.heard == [("white", "a"), ("white", "b")]


async def test_fresh_turns_begin_a_new_conversation_each():
    results = [StepResult(told("b")), StepResult(is_done=True)]
    table = Table(Opening(told("a"), agent="black"), results)
    await TurnTaking(is_fresh=True).run(table)
    assert table.heard == [("black", "a"), ("black", "b")]
    assert table.acted == ["black anew", "black anew"]
