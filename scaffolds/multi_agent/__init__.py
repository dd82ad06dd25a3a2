"""Several agents in an environment that knows of one: the scaffold says whose turn it is, one of them acts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.errors import ConfigError
from agentrl.types.message import Message, Role
from agentrl_scaffolds.text_replies import as_user, with_system

_ACTOR = (
    "You are {name}. You do a task together with {others}, whose messages begin with their name. You alone act: the "
    "task is judged by what you do and answer."
)
_ADVISER = (
    "You are {name}. You do a task together with {others}, whose messages begin with their name. {actor} alone acts; "
    "say what {actor} needs to know to do the task."
)


class MultiAgent(Scaffold):
    """Lets agents speak in rounds, each in a conversation of its own; the actor's replies go to the environment.

    Every agent reads the opening, what the others say, with their name in front, and what the environment answers; only
    the actor has its tools. `order` has the agents in whose turn they speak, `actor` is one of them; by default all
    that the recipe names in the environment's `agents`, in that order, of whom the last acts. `prompts` has system
    prompts by agent, in place of the default. `max_turns` holds for each agent.

    Example: ``order = ["planner", "solver"]``: opening -> planner's "Ask for the largest." -> solver reads the
    opening and "planner: Ask for the largest.", and calls ``query`` -> the planner reads 'solver: query {"sql":
    ...}' and "Result: 93", and says "That is it." -> solver reads the tool's result and "planner: That is it.", and
    answers "93", which ends it. Both policies are trained by the episode's reward, or each by its own where scorers
    tell them apart.
    """

    def __init__(
        self, order: Sequence[str] = (), actor: str | None = None, prompts: Mapping[str, str] | None = None
    ) -> None:
        self._order, self._actor, self._prompts = tuple(order), actor, dict(prompts or {})
        if isinstance(order, str) or not all(isinstance(name, str) for name in self._order):
            raise ConfigError(f"multi_agent: order is {order!r}; give a list of names")
        if self._order:
            self._check(self._order, actor or self._order[-1])

    async def run(self, context: ScaffoldContext) -> None:
        """Play one episode to its end."""
        order = self._order or context.agents
        actor = self._actor or order[-1]
        agents = {name: context.agent(name) for name in (*order, actor, *self._prompts)}
        opening = await context.start()
        unread = {name: list(with_system(self._prompt(name, order, actor), opening.messages)) for name in order}
        while True:
            for name in order:
                heard, unread[name] = unread[name], []
                reply = await agents[name].generate(heard, opening.tools if name == actor else ())
                _tell(unread, name, (Message(Role.USER, f"{name}: {_spoken(reply)}"),))
                if name != actor:
                    continue
                result = await context.step(reply)
                if result.is_done:
                    return
                unread[actor] += result.messages
                _tell(unread, actor, as_user(result.messages, "Result: "))

    def _prompt(self, name: str, order: Sequence[str], actor: str) -> str:
        others = ", ".join(other for other in dict.fromkeys(order) if other != name) or "nobody"
        default = _ACTOR if name == actor else _ADVISER
        return self._prompts.get(name) or default.format(name=name, others=others, actor=actor)

    def _check(self, order: Sequence[str], actor: str) -> None:
        """Whether there is somebody who acts, and everybody hears something between two turns. Raises ConfigError."""
        if actor not in order:
            raise ConfigError(f"multi_agent: actor '{actor}' is not in order {list(order)}; name one who speaks")
        unknown = sorted(self._prompts.keys() - set(order))
        if unknown:
            raise ConfigError(f"multi_agent: prompts of {unknown}, who are not in order {list(order)}")
        for name, following in zip(order, (*order[1:], order[0]), strict=True):
            if name == following != actor:
                raise ConfigError(
                    f"multi_agent: '{name}' speaks twice in a row in order {list(order)}; only the actor may"
                )


def _tell(unread: Mapping[str, list[Message]], speaker: str, messages: Sequence[Message]) -> None:
    """Keep messages for everybody else, until it is their turn."""
    for name, waiting in unread.items():
        if name != speaker:
            waiting += messages


def _spoken(reply: Message) -> str:
    """What the others hear of a reply: its text, and each call as a line."""
    calls = [f"{call.name} {json.dumps(call.arguments, ensure_ascii=False)}" for call in reply.tool_calls]
    return "\n".join([*([reply.content] if reply.content or not calls else []), *calls])
