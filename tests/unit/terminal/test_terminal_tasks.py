from __future__ import annotations

import random
import subprocess
from collections import Counter

import pytest

from agentrl.envs.definition import load_environment
from agentrl.types.errors import ConfigError
from agentrl.types.task import Split
from agentrl_environments.terminal.experts import CLUMSY_HABITS
from agentrl_environments.terminal.names import ENDINGS, STEMS, file_names
from agentrl_environments.terminal.tasks import KINDS, TASKS, Problem, TerminalOptions, build_problem

OPTIONS = TerminalOptions()


def problems(split: Split, count: int, options: TerminalOptions = OPTIONS, seed: int = 0) -> list[Problem]:
    tasks = [TASKS.task("terminal", split, ordinal, seed) for ordinal in range(count)]
    return [build_problem(options, task.payload["seed"], split) for task in tasks]


def by_a_shell(problem: Problem, folder) -> dict[str, str]:
    """The files after the right command, as a shell of this machine leaves them."""
    for name, text in problem.files.items():
        (folder / name).write_text(text)
    subprocess.run(["sh", "-c", problem.command], cwd=folder, check=True, timeout=60)
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize("kind", KINDS)
def test_the_right_command_makes_the_files_that_are_expected(kind, tmp_path):
    for number, problem in enumerate(problems(Split.TRAIN, 12, TerminalOptions(kinds=(kind,)))):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert by_a_shell(problem, folder) == problem.expected


def test_doing_nothing_is_never_right():
    assert all(problem.files != problem.expected for problem in problems(Split.TRAIN, 400))


def test_no_prompt_names_a_file_that_is_there():
    for problem in problems(Split.TRAIN, 400):
        assert not any(name in problem.prompt for name in problem.files)


def test_equal_arguments_give_equal_problems_and_others_do_not():
    first = problems(Split.TRAIN, 20)
    build_problem.cache_clear()
    assert problems(Split.TRAIN, 20) == first
    assert problems(Split.TRAIN, 20, seed=1) != first
    assert problems(Split.HELDOUT, 20, seed=1) == problems(Split.HELDOUT, 20, seed=2)


def test_held_out_files_are_never_seen_in_training_but_their_words_are():
    names = {split: {name for ending in ENDINGS for name in file_names(split, ending)} for split in Split}
    assert names[Split.TRAIN] & names[Split.HELDOUT] == set()
    assert len(names[Split.TRAIN] | names[Split.HELDOUT]) == len(STEMS) * len(ENDINGS)
    for split, own in names.items():
        used = {name for problem in problems(split, 300) for name in (*problem.files, *problem.expected)}
        assert used <= own
    words = {split: {word for name in own for word in name.split(".")} for split, own in names.items()}
    assert words[Split.HELDOUT] <= words[Split.TRAIN]


def test_every_kind_is_posed_unless_options_say_otherwise():
    assert {problem.kind for problem in problems(Split.TRAIN, 200)} == set(KINDS)
    assert {p.kind for p in problems(Split.TRAIN, 50, TerminalOptions(kinds=("copy",)))} == {"copy"}


def test_unknown_kinds_are_refused_by_name():
    definition = load_environment("terminal")
    with pytest.raises(ConfigError, match="there is no kind 'fly'; there are append, count"):
        definition.parse_options({"kinds": ["fly"]})
    with pytest.raises(ConfigError, match="kinds"):
        definition.parse_options({"kinds": []})


def test_the_clumsy_expert_shows_each_habit_as_often_as_it_says_and_stays_with_it():
    definition = load_environment("terminal")
    task = TASKS.task("terminal", Split.TRAIN, 0, 0)
    act = definition.expert("clumsy").act
    first = [act(OPTIONS, task, [], random.Random(f"{n}")) for n in range(4000)]
    commands = Counter(message.tool_calls[0].arguments["command"] if message.tool_calls else "" for message in first)
    looks = CLUMSY_HABITS["clean"] + CLUMSY_HABITS["peek"]
    assert commands["ls"] / 4000 == pytest.approx(looks, abs=0.04)
    assert commands[""] / 4000 == pytest.approx(CLUMSY_HABITS["skip"], abs=0.03)
    assert len(commands) == 3
