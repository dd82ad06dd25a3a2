"""Small right functions with blanks, of which problems are made: lines for tiny policies, functions for larger ones."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NAMES = tuple("rate size score level count stock width depth speed load power range share grade point value".split())
FUNCTIONS = tuple("solve find make give take work tell show pick form".split())
_WORDS = tuple("red green blue gray pink gold black white brown teal level noon radar stats".split())

DRAWS: Mapping[str, Callable[[random.Random], object]] = {
    "int": lambda rng: rng.randint(-9, 20),
    "size": lambda rng: rng.randint(0, 12),
    "word": lambda rng: rng.choice(_WORDS),
    "ints": lambda rng: [rng.randint(-9, 20) for _ in range(rng.randint(1, 6))],
    "words": lambda rng: [rng.choice(_WORDS) for _ in range(rng.randint(1, 5))],
}
"""Kinds of arguments, and how one is drawn."""


@dataclass(frozen=True, slots=True)
class Template:
    """A function and what it does, with ``$f`` for its name, ``$a`` and ``$b`` for parameters, ``$n`` for a number.

    `takes` has the kinds of its arguments. It must end whatever constant or operator of it is changed: it has no
    ``while`` and does not call itself.
    """

    description: str
    takes: tuple[str, ...]
    source: str


def _line(description: str, expression: str, *takes: str) -> Template:
    return Template(description, takes, f"$f = lambda {', '.join(('$a', '$b')[: len(takes)])}: {expression}")


def _function(description: str, takes: tuple[str, ...], *lines: str) -> Template:
    parameters = ", ".join(("$a", "$b")[: len(takes)])
    return Template(description, takes, "\n".join([f"def $f({parameters}):", *(f"    {line}" for line in lines)]))


LINES = (
    _line("add its two numbers", "$a + $b", "int", "int"),
    _line("subtract the second number from the first", "$a - $b", "int", "int"),
    _line("multiply its two numbers", "$a * $b", "int", "int"),
    _line("give the larger number", "max($a, $b)", "int", "int"),
    _line("give the smaller number", "min($a, $b)", "int", "int"),
    _line("tell whether the first number is above the second", "$a > $b", "size", "size"),
    _line("tell whether the first number is below the second", "$a < $b", "size", "size"),
    _line("tell whether its two numbers are equal", "$a == $b", "size", "size"),
)
"""Single expressions of two numbers."""

FUNCTIONS_OF_LINES = (
    _function("the sum of the numbers above $n", ("ints",), "return sum(x for x in $a if x > $n)"),
    _function("how many numbers are at most $n", ("ints",), "return len([x for x in $a if x <= $n])"),
    _function("every number times $n", ("ints",), "return [x * $n for x in $a]"),
    _function("the numbers without the first and the last", ("ints",), "return $a[1:-1]"),
    _function("every second number, the first included", ("ints",), "return $a[::2]"),
    _function("the numbers in reverse order", ("ints",), "return $a[::-1]"),
    _function("the first number, or $n if there is none", ("ints",), "return $a[0] if len($a) > 0 else $n"),
    _function("the difference of the largest and the smallest number", ("ints",), "return max($a) - min($a)"),
    _function("whether all numbers are at least $n", ("ints",), "return all(x >= $n for x in $a)"),
    _function("whether any number can be divided by $n", ("ints",), "return any(x % $n == 0 for x in $a)"),
    _function("the number forced into the bounds 0 and $n", ("int",), "return max(0, min($a, $n))"),
    _function("the sum of the whole numbers from 1 to the given one", ("size",), "return sum(range(1, $a + 1))"),
    _function("the given power of $n", ("size",), "return $n ** $a"),
    _function("whether the word reads the same backwards", ("word",), "return $a == $a[::-1]"),
    _function("the word without its first letter, $n times", ("word",), "return $a[1:] * $n"),
    _function("how many words are longer than $n letters", ("words",), "return len([w for w in $a if len(w) > $n])"),
    _function("the words of at least $n letters", ("words",), "return [w for w in $a if len(w) >= $n]"),
    _function(
        "the places, counted from 0, at which the number stands",
        ("ints", "int"),
        "return [i for i, x in enumerate($a) if x == $b]",
    ),
    _function(
        "the running sums of the numbers",
        ("ints",),
        "sums, so_far = [], 0",
        "for x in $a:",
        "    so_far = so_far + x",
        "    sums.append(so_far)",
        "return sums",
    ),
    _function(
        "the given number of the Fibonacci sequence, which begins with 0 and 1",
        ("size",),
        "one, other = 0, 1",
        "for _ in range($a):",
        "    one, other = other, one + other",
        "return one",
    ),
    _function(
        "the factorial of the number",
        ("size",),
        "product = 1",
        "for factor in range(2, $a + 1):",
        "    product = product * factor",
        "return product",
    ),
    _function(
        "the length of the longest row of neighbours that are equal",
        ("words",),
        "longest = row = 1",
        "for before, after in zip($a, $a[1:]):",
        "    row = row + 1 if before == after else 1",
        "    longest = max(longest, row)",
        "return longest",
    ),
    _function(
        "the differences of neighbouring numbers, later minus earlier",
        ("ints",),
        "gaps = []",
        "for place in range(1, len($a)):",
        "    gaps.append($a[place] - $a[place - 1])",
        "return gaps",
    ),
    _function(
        "how often each word occurs",
        ("words",),
        "counts = {}",
        "for word in $a:",
        "    counts[word] = counts.get(word, 0) + 1",
        "return counts",
    ),
    _function(
        "the grade of a number: 'low' below 0, 'high' from $n on, else 'middle'",
        ("int",),
        "if $a < 0:",
        "    return 'low'",
        "if $a >= $n:",
        "    return 'high'",
        "return 'middle'",
    ),
    _function(
        "all pairs of numbers, one from each list, whose sum is above $n",
        ("ints", "ints"),
        "pairs = []",
        "for x in $a:",
        "    for y in $b:",
        "        if x + y > $n:",
        "            pairs.append((x, y))",
        "return pairs",
    ),
)
"""Functions, some of several lines."""
