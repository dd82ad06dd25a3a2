"""Makes one problem of a seed: files, what is to be done with them, and the files as they must be in the end."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

from pydantic import Field, field_validator

from agentrl.config.base import ConfigModel
from agentrl.envs.authoring import Generated
from agentrl.types.task import Split
from agentrl_environments.terminal.names import ENDINGS, WORDS, file_names

Files = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Slots:
    """What a kind of problem is filled with: the file that it is about, a new name, a word and an ending."""

    file: str
    new: str
    word: str
    ending: str


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of problem: its phrasings and the right command, with the slots to be filled, and what it does.

    Neither phrasing names the file that is there: an agent has to look.
    """

    phrasings: tuple[str, str]
    command: str
    effect: Callable[[Files, Slots], Files]
    lines: Callable[[random.Random], str] = lambda rng: rng.choice(WORDS)
    has_many_files: bool = False


def _without(files: Files, is_gone: Callable[[str], bool]) -> Files:
    return {name: text for name, text in files.items() if not is_gone(name)}


KINDS = {
    "append": Kind(
        ("add the line {word} to the file.", "put {word} at the end of the file."),
        "echo {word} >> {file}",
        lambda files, slots: {**files, slots.file: f"{files[slots.file]}{slots.word}\n"},
    ),
    "count": Kind(
        ("count the lines with {word} into {new}.", "write into {new} how many lines say {word}."),
        "grep -c {word} {file} > {new}",
        lambda files, slots: {**files, slots.new: f"{files[slots.file].split().count(slots.word)}\n"},
    ),
    "rename": Kind(
        ("rename the file to {new}.", "give the file the name {new}."),
        "mv {file} {new}",
        lambda files, slots: {**_without(files, lambda name: name == slots.file), slots.new: files[slots.file]},
    ),
    "copy": Kind(
        ("copy the file to {new}.", "make {new} a copy of the file."),
        "cp {file} {new}",
        lambda files, slots: {**files, slots.new: files[slots.file]},
    ),
    "total": Kind(
        ("write the sum of the lines into {new}.", "add up the lines into {new}."),
        "awk '{{s+=$1}} END {{print s}}' {file} > {new}",
        lambda files, slots: {**files, slots.new: f"{sum(map(int, files[slots.file].split()))}\n"},
        lines=lambda rng: str(rng.randint(10, 99)),
    ),
    "delete": Kind(
        ("delete the {ending} files.", "remove all files that end in {ending}."),
        "rm {file}",
        lambda files, slots: _without(files, lambda name: name.endswith(f".{slots.ending}")),
        has_many_files=True,
    ),
}


class TerminalOptions(ConfigModel):
    """Which problems are posed and what a command may cost."""

    kinds: Annotated[tuple[str, ...], Field(min_length=1)] = tuple(KINDS)
    """Kinds of problems, equally often: ``append``, ``count``, ``rename``, ``copy``, ``total``, ``delete``."""
    command_s: Annotated[float, Field(gt=0)] = 5.0
    """Seconds that one command of the agent may run before it is killed with all that it started."""
    max_shown_bytes: Annotated[int, Field(gt=0)] = 400
    """Output of a command that the policy sees, of stdout and stderr each; the rest is named as cut."""
    max_workspace_bytes: Annotated[int, Field(gt=0)] = 1 << 20
    """Bytes of files that are taken out of the agent's sandbox to be judged; an agent that left more has failed."""

    isolated: bool = True
    """Whether commands must be kept from the machine. Without it sandboxes of kind ``local`` will do, which are
    quicker: for a warm start, where nobody acts but the experts."""

    @field_validator("kinds")
    @classmethod
    def _are_known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"there is no kind '{unknown[0]}'; there are {', '.join(KINDS)}")
        return kinds


@dataclass(frozen=True, slots=True)
class Problem:
    """Files, what to do with them, and the files that must be there in the end, with nothing else changed.

    Example: ``rename the file to maple.csv.`` of ``{"amber.txt": "red\\n"}`` has the command ``mv amber.txt maple.csv``
    and expects ``{"maple.csv": "red\\n"}``.
    """

    kind: str
    prompt: str
    files: Files
    slots: Slots
    expected: Files

    @property
    def command(self) -> str:
        """What does it."""
        return self.command_on(f"*.{self.slots.ending}" if KINDS[self.kind].has_many_files else self.slots.file)

    def command_on(self, file: str) -> str:
        """The same command with another file."""
        slots = self.slots
        return KINDS[self.kind].command.format(file=file, new=slots.new, word=slots.word)


TASKS = Generated(lambda chance: {"seed": f"{chance.getrandbits(64):016x}"})
"""A task is a seed: what it stands for depends on the options and the split."""


@lru_cache(maxsize=512)
def build_problem(options: TerminalOptions, seed: str, split: Split) -> Problem:
    """The problem that a task's seed stands for: equal seeds give equal problems."""
    rng = random.Random(seed)
    name = rng.choice(options.kinds)
    kind = KINDS[name]
    ending, other = rng.sample(ENDINGS, 2)
    mine = rng.sample(file_names(split, ending), 2 if kind.has_many_files else 1)
    others = rng.sample(file_names(split, other), 1 if kind.has_many_files else 0)
    files = {file: _text(rng, kind) for file in sorted([*mine, *others])}
    new = rng.choice([file for file in file_names(split, rng.choice(ENDINGS)) if file not in files])
    slots = Slots(mine[0], new, _word(rng, files[mine[0]]), ending)
    prompt = rng.choice(kind.phrasings).format(new=slots.new, word=slots.word, ending=slots.ending)
    return Problem(name, prompt, files, slots, kind.effect(files, slots))


def _text(rng: random.Random, kind: Kind) -> str:
    return "".join(f"{kind.lines(rng)}\n" for _ in range(rng.randint(3, 6)))


def _word(rng: random.Random, text: str) -> str:
    """A word of the text, so that a count is not zero; any word where the text has numbers."""
    return rng.choice([word for word in text.split() if word in WORDS] or WORDS)
