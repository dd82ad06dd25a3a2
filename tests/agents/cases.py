"""How each agent is run, as data: what the scaffold `program` is given, and which folders its sandbox must show."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from agentrl_scaffolds.program import Program

VENV = Path(__file__).parents[2] / ".venv-agents"
_SHARED = {"HOME": "/tmp/home", "PATH": f"{VENV}/bin:/usr/local/bin:/usr/bin:/bin"}
_MOST_S = 900.0


@dataclass(frozen=True, slots=True)
class AgentCase:
    """One agent: what its command line, variables and files are, in the words of `Program`."""

    name: str
    dialect: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    home_files: Mapping[str, str] = field(default_factory=dict)

    def program(self, timeout_s: float = _MOST_S) -> Program:
        """The scaffold that plays it. Its home is apart from the workspace."""
        return Program(self.command, timeout_s, self.variables, self.home_files)

    @property
    def variables(self) -> dict[str, str]:
        """Its environment, with what all have."""
        return {**_SHARED, **self.environment}


# It ends by a command of its own, and would ask for a price list at its start. Ten attempts take it five minutes.
MINI_SWE_AGENT = AgentCase(
    "mini-swe-agent",
    "chat",
    (
        *("mini", "--yolo", "--exit-immediately", "--cost-limit", "0", "--model", "openai/{model}"),
        *("--output", "/tmp/home/trajectory.json", "--task", "{prompt}"),
    ),
    {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_CONFIGURED": "true",
        "MSWEA_COST_TRACKING": "ignore_errors",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
        "MSWEA_SILENT_STARTUP": "1",
    },
)

# An unknown model's name: for those that it knows it sends its tools in forms of its own.
CODEX = AgentCase(
    "codex",
    "responses",
    (
        *(
            "sh",
            "-c",
            'exec codex exec --config model_providers.gateway.base_url="\\"$OPENAI_BASE_URL\\"" "$@"',
            "codex",
        ),
        *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "{prompt}"),
    ),
    home_files={
        ".codex/config.toml": """\
model = "{model}"
model_provider = "gateway"
check_for_update_on_startup = false
web_search = "disabled"

[model_providers.gateway]
name = "gateway"
env_key = "OPENAI_API_KEY"
wire_api = "responses"

[analytics]
enabled = false
"""
    },
)

CLAUDE_CODE = AgentCase(
    "claude-code",
    "messages",
    ("claude", "--dangerously-skip-permissions", "--print", "{prompt}"),
    {"ANTHROPIC_MODEL": "{model}", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"},
)

AGENTS = (MINI_SWE_AGENT, CODEX, CLAUDE_CODE)


def read_only_folders() -> tuple[Path, ...]:
    """What of this machine a sandbox needs for them: the installation, and the Python that it was made with."""
    lines = (VENV / "pyvenv.cfg").read_text().splitlines()
    python = Path(next(line.partition("=")[2].strip() for line in lines if line.startswith("home"))).parent
    return (VENV,) if python == Path("/usr") else (VENV, python)
