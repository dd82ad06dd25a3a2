from __future__ import annotations

import pytest

from agentrl_environments.reasoning_gym.answers import LISTS, may_judge
from agentrl_environments.reasoning_gym.tasks import pack, unpack


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("countdown", "(7 - 3)*4 + 12/6"),
        ("puzzle24", "-3*(1 - 9)"),
        ("polynomial_multiplication", "6*x**2 - 4424*y**4 + 1"),
        ("simple_integration", "-x**(-2)/3 + exp(2*x)*sin(x)**2 + sqrt(x) + C"),
        ("spiral_matrix", "[1, 2, [-3]]"),
        ("spiral_matrix", "1 2 3"),
        ("string_insertion", "DDABC"),
        ("string_insertion", "['A', 'B']"),
        ("n_queens", "_ Q _\nQ _ _"),
        ("chain_sum", "__import__('os')"),  # its judge compares
    ],
)
def test_answers_of_the_right_form_are_judged(generator, answer):
    assert may_judge(generator, answer)


@pytest.mark.parametrize(
    ("generator", "answer"),
    [
        ("countdown", "__import__('os').system('true')"),
        ("countdown", "9**9"),
        ("countdown", "x"),
        ("countdown", "3!"),
        ("countdown", "1" * 3000),
        ("puzzle24", "max(24, 1)"),
        ("puzzle24", "True"),
        ("polynomial_multiplication", "x.__class__"),
        ("polynomial_multiplication", "S('1')"),
        ("polynomial_multiplication", "(lambda: 1)()"),
        ("polynomial_multiplication", "9**9**9"),
        ("polynomial_multiplication", "x**(99*99)"),
        ("polynomial_multiplication", "x**1" + "0" * 400),
        ("polynomial_multiplication", "((9**99)**99)**99"),
        ("simple_integration", "exp(x, evaluate=False)"),
        ("simple_integration", "preview(x)"),
        ("spiral_matrix", "[open('a')]"),
        ("binary_matrix", "[0]*10**10"),
        ("n_queens", "[x for x in (1,)]"),
        ("string_insertion", "f'{1}'"),
    ],
)
def test_programs_and_numbers_without_end_are_not_judged(generator, answer):
    assert not may_judge(generator, answer)


@pytest.mark.parametrize("generator", sorted(LISTS))
@pytest.mark.parametrize("link", ["-", "+", "not ", "~"])
def test_no_chain_that_is_too_deep_to_be_read_is_judged(generator, link):
    # `eval` has one frame more than `ast.parse` before it gives up, so it reads some lengths that the other does not.
    lengths = [*range(50, 2850, 40), *range(2850, 3150)]
    assert not [n for n in lengths if may_judge(generator, f"[H.append(1),{link * n}1]")]


def test_a_question_crosses_as_json_and_keeps_its_tuples():
    entry = {"question": "1?", "answer": "1", "metadata": {"difficulty": (1, 2), 3: [None, -1.5]}}
    packed = pack(entry)
    assert isinstance(packed, str)
    assert unpack(packed) == entry
    odd = pack({"question": "1?", "metadata": {"of": object}})
    assert unpack(odd) == {"question": "1?", "metadata": {"of": "<class 'object'>"}}
