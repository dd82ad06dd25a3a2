"""Reads pickles of plain values, which name calls that the reader makes and import nothing."""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from agentrl.engine.request import BadRequestError

Name = tuple[str, str]
"""Module, and name in it."""
_LITERALS = {
    "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES",
    "SHORT_BINBYTES", "BINBYTES8",
}  # fmt: skip
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}


@dataclass(slots=True)
class Record:
    """An object of a class that only its name is known of, by its fields."""

    name: Name
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Named:
    """What stands for a function or class until a call of it is read."""

    name: Name

    def __str__(self) -> str:
        return ".".join(self.name)


class PickleReader:
    """Reads the instructions that values, tuples, lists, dicts and the reader's own calls are written in, one by one.

    Nothing of the process can be reached: a name is a value, a call or a class of records that the reader was given,
    and fields are set of records alone. An identity that torch has for a storage stays the tuple that it is.

    Example: with ``calls={("torch", "Size"): tuple}`` a pickled ``torch.Size([2, 3])`` is read as ``(2, 3)``.
    """

    def __init__(
        self, values: Mapping[Name, Any], calls: Mapping[Name, Callable[..., Any]], records: frozenset[Name]
    ) -> None:
        self._values, self._calls, self._records = values, calls, records
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def read(self, file: BytesIO) -> Any:
        """The next pickle of a file.

        Raises:
            BadRequestError: it names or calls what the reader was not given.
            ValueError, TypeError, LookupError: it is damaged, or holds other than such values.
        """
        self._stack, self._marks, self._memo = [], [], {}
        for opcode, argument, _place in pickletools.genops(file):
            if opcode.name != "STOP":
                self._follow(opcode.name, argument)
        (value,) = self._stack
        return value

    def _follow(self, code: str, argument: Any) -> None:
        stack = self._stack
        match code:
            case "PROTO" | "FRAME" | "BINPERSID":
                return
            case _ if code in _LITERALS:
                stack.append(argument)
            case _ if code in _CONSTANTS:
                stack.append(_CONSTANTS[code])
            case "MEMOIZE" | "BINPUT" | "LONG_BINPUT":
                self._memo[len(self._memo) if argument is None else argument] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(self._memo[argument])
            case "GLOBAL" | "STACK_GLOBAL":
                module, name = argument.split(" ", 1) if argument else self._cut(-2)
                stack.append(self._find((module, name)))
            case "REDUCE" | "NEWOBJ" | "BUILD":
                target, given = self._cut(-2)
                stack.append(self._made(code, target, given))
            case _:
                self._collect(code)

    def _collect(self, code: str) -> None:
        """Tuples, lists and dicts."""
        stack = self._stack
        match code:
            case "MARK":
                self._marks.append(len(stack))
            case "EMPTY_LIST":
                stack.append([])
            case "EMPTY_DICT":
                stack.append({})
            case "TUPLE1" | "TUPLE2" | "TUPLE3":
                stack.append(tuple(self._cut(-int(code[-1]))))
            case "TUPLE":
                stack.append(tuple(self._cut(self._marks.pop())))
            case "APPEND" | "APPENDS":
                more = self._cut(-1 if code == "APPEND" else self._marks.pop())
                _of_type(stack[-1], list).extend(more)
            case "SETITEM" | "SETITEMS":
                more = self._cut(-2 if code == "SETITEM" else self._marks.pop())
                keys = [_of_type(key, str) for key in more[::2]]
                _of_type(stack[-1], dict).update(zip(keys, more[1::2], strict=True))
            case _:
                raise ValueError(f"pickled tensors have no {code}")

    def _cut(self, start: int) -> list[Any]:
        """Take what is on the stack from a place on."""
        if -start > len(self._stack):
            raise ValueError("a pickle takes more than it has put on its stack")
        taken = self._stack[start:]
        del self._stack[start:]
        return taken

    def _find(self, name: Name) -> Any:
        if name in self._values:
            return self._values[name]
        if name not in self._calls and name not in self._records:
            raise BadRequestError(f"the payload asks for {'.'.join(map(str, name))}; only plain tensors are read")
        return _Named(name)

    def _made(self, code: str, target: Any, given: Any) -> Any:
        """The result of a call, a new record, or one that has its fields now."""
        if code == "BUILD":
            _of_type(target, Record).fields.update(_of_type(given, dict))
            return target
        arguments = _of_type(given, tuple)
        if isinstance(target, _Named):
            if code == "REDUCE" and target.name in self._calls:
                return self._calls[target.name](*arguments)
            if code == "NEWOBJ" and target.name in self._records and not arguments:
                return Record(target.name)
        raise BadRequestError(f"the payload calls {str(target)[:100]}; only plain tensors are read")


def _of_type(value: Any, kind: type) -> Any:
    """Raises TypeError if it is of another."""
    if type(value) is not kind:
        raise TypeError(f"a pickle has {type(value).__name__} where {kind.__name__} belongs")
    return value
