"""Scaffolds that are no part of agentrl, some of which end or hold the process that runs them."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from agentrl.protocols import Scaffold, ScaffoldContext
from agentrl.types.message import Message


class Plain(Scaffold):
    """As `tool_calling` does."""

    async def run(self, context: ScaffoldContext) -> None:
        opening = await context.start()
        reply = await context.generate(opening.messages, opening.tools)
        self.misbehave(opening.messages[-1])
        while not (result := await context.step(reply)).is_done:
            reply = await context.generate(result.messages, opening.tools)

    def misbehave(self, question: Message) -> None:
        """Does nothing of the kind."""


class Bad(Plain):
    """Misbehaves behind the first reply of episodes whose question has some words in it."""

    def __init__(self, fault: str, words: list[str]) -> None:
        self._fault, self._words = fault, words

    def misbehave(self, question: Message) -> None:
        if question.content not in self._words:
            return
        if self._fault == "hang":
            print("holds up whoever plays it", flush=True)
            time.sleep(3600)
        if self._fault == "exit":
            os._exit(3)
        if self._fault == "sys_exit":
            sys.exit(4)
        if self._fault == "crash":
            ctypes.string_at(0)
