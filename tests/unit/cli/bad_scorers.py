"""Scorers of turns: what their recipes get wrong by themselves, and together."""

from __future__ import annotations

from tests.unit.cli.bad_case import Case, train

_JUDGE = 'kind="judge", name="style", url="http://localhost:1/v1", model="m", rubric="Is it polite?"'
_SCALED = f"{_JUDGE}, scale=[0, 10]"
_OWN = "tests.unit.scorers.own_functions"
_TEACHER = 'kind="teacher", name="t"'
_SELF = 'kind="self_teacher", name="self"'
_COMBINED = 'kind="combined", name="all"'


def _scored(name: str, *tables: str, says: str | tuple[str, ...]) -> Case:
    """The verifier and some other scorers."""
    scorers = ", ".join(f"{{{table}}}" for table in ('kind="verifier"', *tables))
    return train(f"scorers-{name}", f"environment.scorers=[{scorers}]", says=says)


def _function(name: str, function: str, says: str | tuple[str, ...]) -> Case:
    return _scored(name, f'kind="turn_function", name="mine", function="{function}"', says=says)


CASES: tuple[Case, ...] = (
    train("scorers-words", 'environment.scorers=["verifier"]', says=("environment", "'verifier'")),
    _scored("kind", 'kind="juge", name="style"', says=("no kind of scorers 'juge'", "did you mean 'judge'?")),
    _scored("kind-of-episodes", 'kind="verifer", name="v"', says="did you mean 'verifier'?"),
    _scored("kind-of-nobody", 'kind="xyz", name="v"', says=("no kind of scorers 'xyz'", "there are verifier,")),
    _scored("kind-is-none", f'kind="{_OWN}:NUMBER", name="v"', says=("is a int, not a ScorerDefinition",)),
    _scored("nameless", 'kind="judge", url="http://a", model="m", rubric="r", scale=[0, 1]', says="name is missing"),
    _scored("same-name", _SCALED, _SCALED, says=("'style', 'style'", "give each a name of its own")),
    _scored("no-scale", _JUDGE, says=("scorer 'style'", "a rubric without a scale", "such as scale = [0, 10]")),
    _scored("no-rubric", _SCALED.replace('rubric="Is it polite?", ', ""), says=("scorer 'style'", "rubric is missing")),
    _scored("empty-rubric", _SCALED.replace("Is it polite?", " "), says=("the rubric is empty", "a good turn")),
    _scored("no-room", f"{_JUDGE}, scale=[10, 0]", says=("scale [10, 0] has no room", "the lowest score and then")),
    _scored("endless-scale", f"{_JUDGE}, scale=[0, inf]", says=("scale [0, inf] has no room",)),
    _scored("no-address", _SCALED.replace("http://", ""), says=("'localhost:1/v1' is no address", "http://")),
    _scored("own-messages", f'{_SCALED}, options={{n=2, model="b"}}', says=("['model', 'n']", "leave them out")),
    _scored("slow-answers", f"{_SCALED}, answer_s=90", says=("answer_s 90 must be less than call_s 60",)),
    _scored("key", f'{_SCALED}, api_key_variable="NO_SUCH_KEY"', says=("scorer 'style'", "NO_SUCH_KEY is not set")),
    _scored("typo", f"{_SCALED}, rubrik=3", says=("scorer 'style': unknown key 'rubrik'", "did you mean 'rubric'?")),
    _function("nowhere", "nothere:f", says=("scorer 'mine'", "nothere:f", "cannot be loaded")),
    _function("no-attribute", f"{_OWN}:nothing", says=("scorer 'mine'", "cannot be loaded", "nothing")),
    _function("no-form", "json", says=("scorer 'mine'", "module:attribute")),
    _function("number", f"{_OWN}:NUMBER", says=("scorer 'mine'", "is a int, not a function", "takes a ScoredTurn")),
    _scored("nothing", f"{_COMBINED}, parts={{verifier=0.0}}", says=("scorer 'all'", "sum to nothing", "a weight")),
    _scored("no-parts", f"{_COMBINED}, parts={{}}", says=("scorer 'all'", "sum to nothing")),
    _scored("balance", _SCALED, f"{_COMBINED}, normalise=true, parts={{verifier=0.5, style=-0.5}}",
            says=("scorer 'all'", "sum to nothing to divide by", "normalise = false")),
    _scored("part", _SCALED, f"{_COMBINED}, parts={{stile=1.0}}",
            says=("scorer 'all' is made of 'stile'", "did you mean 'style'?")),
    _scored("gate", f'{_COMBINED}, parts={{verifier=1.0}}, gates=[{{scorer="xyz", at_least=1}}]',
            says=("scorer 'all' is made of 'xyz'", "the environment has verifier, all")),
    _scored("itself", f"{_COMBINED}, parts={{all=1.0}}", says=("made of one another: all -> all", "take one out")),
    _scored("circle", f"{_COMBINED}, parts={{b=1.0}}", 'kind="combined", name="b", parts={all=1.0}',
            says=("made of one another: ", "all -> b", "take one out")),
    _scored("clip", f"{_COMBINED}, parts={{verifier=1.0}}, clip=[1, 1]", says=("clip [1.0, 1.0] has no room",)),
    _scored("endless", f"{_COMBINED}, parts={{verifier=inf}}", says=("parts.verifier: ", "finite")),
    _scored("asking", f'{_COMBINED}, parts={{verifier=1.0}}, late="drop"', says=("['late'] mean nothing",)),
    _scored("teacher-of-nothing", _TEACHER, says=("scorer 't'", "give `policy`", "or `url`")),
    _scored("two-teachers", f'{_TEACHER}, policy="main", url="http://a"', says=("scorer 't'", "give `policy`")),
    _scored("teacher-unknown", f'{_TEACHER}, policy="big"',
            says=("scorer 't' names policies ['big']", "the recipe has main")),
    _scored("teacher-trained", f'{_TEACHER}, policy="main"',
            says=("scorer 't' asks policy 'main', whose weights change", "frozen", "self_teacher")),
    _scored("self-of-nobody", _SELF, says=("scorer 'self'", "policy is missing")),
    _scored("self-unknown", f'{_SELF}, policy="big"', says=("scorer 'self' names policies ['big']", "has main")),
    _scored("self-at-once", f'{_SELF}, policy="main", interval_steps=0', says=("scorer 'self'", "interval_steps")),
    _scored("of-policies", f'{_SCALED}, policies=["big"]', says=("scorer 'style' names policies ['big']",)),
)  # fmt: skip
