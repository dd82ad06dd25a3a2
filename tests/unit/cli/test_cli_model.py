from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from agentrl.cli.main import app
from agentrl.orchestration.model_check import Level, check_model
from agentrl.tokens.config import ChatConfig


@dataclass(frozen=True)
class Verdict:
    """What a side's verification says of a folder."""

    architecture: str
    side: str
    is_verified: bool
    max_gap_nats: float
    reason: str


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> dict[str, Verdict]:
    """Verdicts of both sides, to be changed by a test."""
    verdicts = {side: Verdict("Qwen3ForCausalLM", side, True, 2e-6, "") for side in ("trainer", "engine")}
    for side in verdicts:
        module = ModuleType(f"agentrl.{side}.verification")
        setattr(module, f"check_{side}", lambda folder, side=side: verdicts[side])
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return verdicts


@pytest.fixture
def folder(tiny_model: Path, tmp_path: Path) -> Path:
    """A copy of a model that agentrl made."""
    return Path(shutil.copytree(tiny_model, tmp_path / "model"))


def check(folder: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["model", "check", str(folder), *options], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_model_that_agentrl_made_can_be_used(folder, verified):
    code, text = check(folder)
    assert code == 0
    for line in (
        "Qwen3ForCausalLM, verified: within 2.0e-06 nats of the model's own code",
        "renderer 'qwen3': it gives what the template in chat_template.jinja gives",
        "calls are written and read back",
        "a reply ends with <|im_end|>; runs stop at <|im_end|>, <|endoftext|>",
        "512 tokens",
        "parameters, stored as float32, output layer tied to the embeddings",
        "a run can use this model",
    ):
        assert line in text
    assert len(text.splitlines()) < 24


def test_a_refused_architecture_is_named_with_what_to_choose(folder, verified):
    verified["engine"] = Verdict("MambaForCausalLM", "engine", False, 2.6, "its layers keep a state")
    code, text = check(folder)
    assert code == 1
    assert "MambaForCausalLM is refused: its layers keep a state; choose a model of a verified architecture" in text
    assert "a run cannot use this model as it is" in text


def test_a_folder_without_a_model_is_one_message(tmp_path):
    code, text = check(tmp_path)
    assert code == 1
    assert text.startswith(f"error: no model at {tmp_path}: config.json is missing; make one with ")
    assert text.count("\n") == 1


def test_a_template_without_tools_is_said_with_what_to_choose_and_stops_nothing(folder, verified):
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.role + ': ' + m.content + '<|im_end|>' }}{% endfor %}"
    )
    code, text = check(folder)
    assert code == 0
    assert "tools do not appear in the prompt" in text
    assert "for environments with tools choose another chat.renderer" in text


@pytest.mark.parametrize(
    ("file", "content", "topic", "message"),
    [
        ("chat_template.jinja", "{% for", "chat format", "is not valid Jinja"),
        ("tokenizer.json", None, "chat format", "no tokenizer.json"),
        ("model.safetensors", None, "trains", "no safetensors weights"),
        ("model.safetensors", "{}", "trains", "cannot be read"),
    ],
)
def test_what_stops_a_run_is_found_and_the_rest_is_checked_all_the_same(
    folder, verified, file, content, topic, message
):
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    findings = list(check_model(folder, ChatConfig()))
    bad = [finding for finding in findings if finding.level is Level.BAD]
    assert [finding.topic for finding in bad] == [topic]
    assert message in bad[0].text
    assert {"trainer", "engine", "context"} <= {finding.topic for finding in findings}


def test_end_tokens_that_disagree_are_told_apart(folder, verified):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    code, text = check(folder)
    assert code == 0
    assert (
        "the model's files name <|endoftext|>, not <|im_end|>: runs stop all the same, other programs may not" in text
    )


def test_layers_that_adapters_would_look_for_in_vain_are_named(folder, verified):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes().replace(b"q_proj", b"x_proj"))
    code, text = check(folder)
    assert code == 0
    assert "no layers q_proj: for LoRA set trainer.lora.target_modules" in text


def test_a_renderer_of_ones_own_choice_is_checked(folder, verified):
    code, text = check(folder, "--renderer", "glm-4.5")
    assert code == 1
    assert "chat.renderer 'glm-4.5' does not fit" in text
