"""A judge asked over HTTP by the SDK of OpenAI: what it is shown, and what becomes of each way to answer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from agentrl.scorers.definition import UNREACHABLE, ScorerSetting
from agentrl.scorers.judge import build_judge, check_judge
from agentrl.testing.scripted_judge import JudgeFault, JudgeQuestion, JudgeScore, JudgeScript, scripted_judge
from agentrl.types.errors import Boundary, ConfigError, EpisodeError
from agentrl.types.turn_score import check_turn_score
from tests.unit.scorers.judged import judge_config, judging, turn_of

KINDS = {
    JudgeFault.PROSE: "prose",
    JudgeFault.WRONG_TURN: "identity",
    JudgeFault.NAN: "value",
    JudgeFault.CUT: "cut",
    JudgeFault.EMPTY: "answer",
    JudgeFault.NO_COMPLETION: "answer",
    JudgeFault.BROKEN: "server",
    JudgeFault.NO_KEY: "key",
    JudgeFault.NO_MODEL: "model",
    JudgeFault.REFUSED: "refused",
    JudgeFault.GONE: "connection",
}


def always(said: JudgeScore | JudgeFault) -> JudgeScript:
    return lambda question: said


async def test_each_turn_gets_the_verdict_on_it_by_the_scale(tiny_model: Path):
    turns = [turn_of(tiny_model, "user: select\n", f"reply {number}", number) for number in range(6)]
    script = lambda question: JudgeScore(2.0 * int(question.reply[-1]) - 5, f"of {question.reply}")  # noqa: E731
    async with judging(tiny_model, script, scale=[-5, 15]) as (judge, _):
        scores = await judge.score(turns)
    assert [score.key for score in scores] == [turn.key for turn in turns]
    assert [score.value for score in scores] == pytest.approx([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    assert [score.note for score in scores] == [f"of reply {number}" for number in range(6)]
    assert [check_turn_score(*pair) for pair in zip(turns, scores, strict=True)] == scores
    assert all(score.prior is None and score.logprobs is None for score in scores)


async def test_it_is_shown_the_conversation_as_text_and_the_turn_apart(tiny_model: Path):
    before, reply = "<|im_start|>user\nWhat is é?<|im_end|>\n<|im_start|>assistant\n", "It is é.<|im_end|>"
    async with judging(tiny_model, always(JudgeScore(5)), options={"temperature": 0}) as (judge, server):
        await judge.score([turn_of(tiny_model, before, reply)])
        (question,) = server.questions
    assert (question.before, question.reply) == (before, reply)
    assert question.body["model"] == "asked-for"
    assert question.body["temperature"] == 0
    assert "Is it polite?" in question.body["messages"][0]["content"]
    assert "from 0 (worst) to 10 (best)" in question.body["messages"][0]["content"]
    form = question.body["response_format"]
    assert form["type"] == "json_schema"
    assert form["json_schema"]["schema"]["required"] == ["turn", "reason", "score"]


@pytest.mark.parametrize(("form", "sent"), [("json_object", {"type": "json_object"}), ("text", None)])
async def test_a_server_that_takes_no_schema_is_asked_in_another_form(tiny_model: Path, form: str, sent: object):
    async with judging(tiny_model, always(JudgeScore(5)), format=form) as (judge, server):
        (score,) = await judge.score([turn_of(tiny_model, "a", "b")])
    assert server.questions[0].body.get("response_format") == sent
    assert score.value == 0.5


@pytest.mark.parametrize("fault", KINDS, ids=str)
async def test_what_is_no_verdict_is_a_failure_and_no_number(tiny_model: Path, fault: JudgeFault):
    turn = turn_of(tiny_model, "a", "b")
    async with judging(tiny_model, always(fault)) as (judge, server):
        (score,) = await judge.score([turn])
    assert check_turn_score(turn, score) is score
    assert (score.value, score.prior, score.logprobs) == (None, None, None)
    assert score.failure is not None
    assert (score.failure.boundary, score.failure.kind) == (Boundary.SCORER, KINDS[fault])
    assert len(server.questions) == 1, "asking again is for the tier"


@pytest.mark.parametrize("fault", [JudgeFault.BUSY, JudgeFault.OVERLOADED], ids=str)
async def test_turns_that_the_server_did_not_take_may_be_sent_again(tiny_model: Path, fault: JudgeFault):
    async with judging(tiny_model, always(fault)) as (judge, server):
        with pytest.raises(EpisodeError) as refused:
            await judge.score([turn_of(tiny_model, "a", "b")])
        assert refused.value.failure.kind == UNREACHABLE
        assert len(server.questions) == 1, "asking again is for the tier"
        server.script = always(JudgeScore(10))
        (score,) = await judge.score([turn_of(tiny_model, "a", "b")])
        assert score.value == 1.0


async def test_a_server_that_ended_took_nothing(tiny_model: Path):
    async with judging(tiny_model, always(JudgeScore(1))) as (judge, server):
        server.close()
        with pytest.raises(EpisodeError) as refused:
            await judge.score([turn_of(tiny_model, "a", "b")])
    assert refused.value.failure.kind == UNREACHABLE


@pytest.mark.parametrize("beyond", [10.5, -1, 1e300])
async def test_a_score_outside_of_the_scale_is_a_failure_and_not_clipped(tiny_model: Path, beyond: float):
    async with judging(tiny_model, always(JudgeScore(beyond))) as (judge, _):
        (score,) = await judge.score([turn_of(tiny_model, "a", "b")])
    assert score.value is None
    assert score.failure is not None
    assert score.failure.kind == "scale"
    assert "on a scale from 0 to 10" in score.failure.message


async def test_one_turn_without_a_verdict_leaves_the_others_of_its_batch_theirs(tiny_model: Path):
    def script(question: JudgeQuestion) -> JudgeScore | JudgeFault:
        return JudgeFault.PROSE if question.reply == "odd" else JudgeScore(10)

    turns = [turn_of(tiny_model, "a", reply, number) for number, reply in enumerate(["b", "odd", "c"])]
    async with judging(tiny_model, script) as (judge, _):
        scores = await judge.score(turns)
    assert [score.value for score in scores] == [1.0, None, 1.0]


async def test_a_judge_that_hangs_is_waited_for_until_its_deadline(tiny_model: Path):
    async with judging(tiny_model, always(JudgeFault.HANG), answer_s=0.5) as (judge, _):
        (score,) = await judge.score([turn_of(tiny_model, "a", "b")])
    assert score.value is None
    assert score.failure is not None
    assert (score.failure.boundary, score.failure.kind) == (Boundary.SCORER, "timeout")


async def test_a_version_is_the_model_that_answered_and_what_it_was_asked_by(tiny_model: Path):
    async def version(model: str, **changes: object) -> str:
        async with judging(tiny_model, always(JudgeScore(1, model=model)), **changes) as (judge, _):
            (score,) = await judge.score([turn_of(tiny_model, "a", "b")])
        return score.version

    first = await version("judge-2026-01")
    assert first.startswith("judge-2026-01:")
    assert await version("judge-2026-01") == first
    others = {
        await version("judge-2026-02"),
        await version("judge-2026-01", rubric="Is it short?"),
        await version("judge-2026-01", scale=[0, 5]),
    }
    assert len({first, *others}) == 4


async def test_the_api_key_comes_from_the_variable_that_is_named_alone(tiny_model: Path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "of another service")
    monkeypatch.setenv("JUDGE_KEY", "of the judge")
    keys = []
    for changes in ({}, {"api_key_variable": "JUDGE_KEY"}):
        async with judging(tiny_model, always(JudgeScore(1)), **changes) as (judge, server):
            await judge.score([turn_of(tiny_model, "a", "b")])
        keys.append(server.questions[0].key)
    assert keys == ["none", "of the judge"]
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="JUDGE_KEY is not set; put the key there"):
        check_judge(judge_config("http://localhost:1", api_key_variable="JUDGE_KEY"))


async def test_a_judge_without_the_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[judge\]'"):
        check_judge(judge_config("http://localhost:1"))


@pytest.mark.parametrize(
    ("said", "words"),
    [
        (JudgeFault.PROSE, "answered prose where JSON was asked for: 'Sure! The turn looks fine to me.'; take a model"),
        (JudgeScore(11), "gave 11.* on a scale from 0 to 10; take"),
        (JudgeFault.NO_KEY, "HTTP 401.*; name the environment variable with its key as api_key_variable"),
        (JudgeFault.NO_MODEL, "HTTP 404.*; correct model, or url"),
        (JudgeFault.REFUSED, 'HTTP 400.*set format = "text"'),
        (JudgeFault.NO_COMPLETION, "answered no chat completion.*; correct url"),
        (JudgeFault.WRONG_TURN, "a model that copies ids"),
    ],
)
async def test_a_judge_that_cannot_judge_is_named_before_the_first_episode(
    tiny_model: Path, said: JudgeScore | JudgeFault, words: str
):
    with scripted_judge(always(said)) as server, pytest.raises(ConfigError, match=words) as refused:
        await build_judge(judge_config(server.url), ScorerSetting({"main": tiny_model}))
    assert "scorer 'style': the judge failed on a sample turn" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("fault", KINDS, ids=str)
async def test_every_fault_on_the_sample_turn_has_a_remedy_in_the_same_line(tiny_model: Path, fault: JudgeFault):
    with scripted_judge(always(fault)) as server, pytest.raises(ConfigError) as refused:
        await build_judge(judge_config(server.url), ScorerSetting({"main": tiny_model}))
    what, _, remedy = str(refused.value).rpartition("; ")
    assert what.startswith("scorer 'style': the judge failed on a sample turn")
    assert len(remedy.split()) > 3


async def test_an_endpoint_that_does_not_answer_is_named_before_the_first_episode(tiny_model: Path):
    with scripted_judge(always(JudgeScore(1))) as server:
        url = server.url
    with pytest.raises(ConfigError, match=f"asked-for at {url} does not answer: .*; start the server, or correct url"):
        await build_judge(judge_config(url), ScorerSetting({"main": tiny_model}))


async def test_a_server_that_is_busy_at_the_start_is_no_fault_of_the_recipe(tiny_model: Path, caplog):
    with caplog.at_level(logging.WARNING):
        async with judging(tiny_model, always(JudgeFault.BUSY), check=True) as (_, server):
            assert len(server.questions) == 1
    assert "scorer 'style' was not tried before the first episode" in caplog.text


async def test_the_sample_turn_is_asked_of_once_and_a_good_judge_is_taken(tiny_model: Path):
    async with judging(tiny_model, always(JudgeScore(1)), check=True) as (_, server):
        assert [question.reply for question in server.questions] == ["assistant: 2 + 2 is 4."]
