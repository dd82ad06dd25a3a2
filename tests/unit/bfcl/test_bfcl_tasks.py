from __future__ import annotations

import pytest

from agentrl.types.errors import ConfigError
from agentrl_environments.bfcl import definition
from agentrl_environments.bfcl.tasks import GoldCall, parse_call


def test_a_reference_call_is_a_name_and_literals():
    assert parse_call("mkdir('temp', parents=True)") == GoldCall("mkdir", ("temp",), {"parents": True})
    assert parse_call("mean(numbers=[-1, 2.5])") == GoldCall("mean", (), {"numbers": [-1, 2.5]})


@pytest.mark.parametrize(
    "text", ["f(g())", "f(__import__('os'))", "a.f()", "f", "f() + f()", "f(**{'a': 1})", "(lambda: 1)()"]
)
def test_whatever_else_is_written_is_refused_and_not_evaluated(text):
    with pytest.raises(ValueError, match=r"malformed node|is not the call of|spreads a mapping"):
        parse_call(text)


def test_a_category_that_is_not_there_is_refused_and_those_that_are_there_are_named():
    with pytest.raises(ConfigError, match=r"'base', 'miss_func', 'miss_param' or 'long_context'"):
        definition.parse_options({"categories": ["memory"]})
