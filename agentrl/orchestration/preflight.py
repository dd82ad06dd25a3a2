"""What can be known to fail before anything is started: from the recipe, the model folders and this machine."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

from agentrl import registry
from agentrl.cluster.config import LocalRuntimeConfig
from agentrl.engine.options import parse_engine_options
from agentrl.envs.config import EnvironmentConfig
from agentrl.envs.servers import server_addresses
from agentrl.envs.virtual import requirements_of
from agentrl.inference.config import AttachedEngineConfig, EmbeddedEngineConfig, SGLangEngineConfig
from agentrl.orchestration.config import PolicyConfig, RunConfig
from agentrl.orchestration.model_files import ModelFiles, context_tokens, read_model_config, read_model_files
from agentrl.orchestration.players import build_scaffold, build_scorers, routing_of
from agentrl.orchestration.runtime_checks import check_colocated, check_several_hosts
from agentrl.rollouts.config import LimitsConfig, ScaffoldConfig
from agentrl.scorers.config import find_definition
from agentrl.telemetry.opening import check_telemetry
from agentrl.trainer.config import TrainerConfig
from agentrl.types.errors import ConfigError

_GPU_NODES = ("nvidia[0-9]*", "dxg", "kfd", "nvhost-gpu", "nvgpu")


def check_run(config: RunConfig) -> None:
    """Everything that shows before a run has a folder. Raises ConfigError."""
    check_resumed(config)
    check_lengths(config, {name: policy.model for name, policy in config.policies.items()})


def check_resumed(config: RunConfig) -> None:
    """The same of a run that began by an earlier check: machine, packages and models may have changed since.

    Raises:
        ConfigError: something that the run needs is not there any more.
    """
    check_recipe(config)
    check_models(config, {name: policy.model for name, policy in config.policies.items()})


def check_recipe(config: RunConfig) -> None:
    """Everything but the models, which need not be there yet. Raises ConfigError."""
    check_players(config)
    check_colocated(config)
    check_telemetry(config.telemetry)
    if not isinstance(config.runtime, LocalRuntimeConfig):
        check_several_hosts(config)
    for scorer in config.turn_scorers():
        find_definition(scorer.kind).check(scorer)
    is_evaluated = any(map(config.is_evaluated, config.trained))
    for name, policy in config.policies.items():
        where = f"policies.{name}"
        if not policy.frozen:
            check_device(policy.trainer, f"{where}.trainer")
        if is_evaluated and name in config.acting and isinstance(policy.engine, AttachedEngineConfig):
            raise ConfigError(
                f"{where}.engine is attached, and evaluation needs an engine of its own: set evaluation.interval_steps "
                "= 0 and evaluation.final_tasks = 0, or have the run start engines"
            )
        _check_engine(where, policy, is_evaluated)


def check_evaluation(config: RunConfig, evaluated: str, models: Mapping[str, Path]) -> None:
    """Everything that shows before an evaluation of a policy on model folders. Raises ConfigError."""
    if not any(config.environments[name].evaluated for name in config.played_by(evaluated)):
        raise ConfigError(f"no environment in which policy '{evaluated}' is trained has evaluated = true; set it there")
    check_players(config)
    for name in config.acting:
        policy = config.policies[name]
        if isinstance(policy.engine, AttachedEngineConfig):
            raise ConfigError(
                f"policies.{name}.engine is attached, and an evaluation starts its own: give a recipe, and "
                f"policies.{name}.engine=embedded behind it"
            )
        _check_engine(f"policies.{name}", policy, is_evaluated=True)
    check_models(config, models)
    check_lengths(config, models)


def check_players(config: RunConfig) -> None:
    """Whether there are the scaffolds, environments and scorers of a recipe. Raises ConfigError."""
    for section in config.environments.values():
        check_scaffold(section.scaffold, plays_here=config.rollout.workers == 0)
        check_environment(section)
    build_scorers(config)
    if ":" not in config.sandbox.kind:
        registry.find_plugin(registry.SANDBOXES, config.sandbox.kind)


def check_scaffold(config: ScaffoldConfig, plays_here: bool = True) -> None:
    """Whether there is such a scaffold, which takes its options. Raises ConfigError.

    One that does not ship with agentrl, and may hang, is only looked for, unless this process is to play it.
    """
    if registry.is_shipped(registry.SCAFFOLDS, config.name) or plays_here:
        build_scaffold(config)
    elif ":" in config.name:
        _check_target(f"scaffold '{config.name}'", config.name)


def check_environment(config: EnvironmentConfig) -> None:
    """Whether there is such an environment, as far as that shows without an import. Raises ConfigError.

    Another interpreter has plugins of its own; so have servers, and a virtual environment that is made of requirements.
    """
    if config.placement == "remote":
        server_addresses(config)
    elif config.interpreter is not None:
        program = config.interpreter
        if not program.is_file() or not os.access(program, os.X_OK):
            raise ConfigError(f"environment.interpreter: no Python at {program}; give the path of one that has agentrl")
    elif config.requirements:
        requirements_of(config.name, config.requirements)
    elif ":" in config.name:
        _check_target(f"environment '{config.name}'", config.name)
    else:
        registry.is_shipped(registry.ENVIRONMENTS, config.name)


def check_device(config: TrainerConfig, where: str) -> None:
    """Whether the machine has a GPU, or a core, for each rank. Raises ConfigError."""
    if config.device == "cpu":
        cores = len(os.sched_getaffinity(0))
        if config.ranks > cores:
            raise ConfigError(
                f"{where}.ranks is {config.ranks}, and this process may use {cores} processor cores; lower it to "
                f"{cores} or less"
            )
        return
    _check_gpus(config.ranks, f'{where}.device is "cuda" with {config.ranks} ranks', f"{where}.ranks")


def check_models(config: RunConfig, models: Mapping[str, Path]) -> None:
    """Whether the folders hold models that fit their policies. Raises ConfigError."""
    for name, folder in models.items():
        policy = config.policies[name]
        try:
            files = read_model_files(folder)
        except ConfigError as error:
            raise ConfigError(f"policies.{name}.model: {error}") from None
        _check_adapters(name, policy, files)
        if config.sampling_of(name).routed_experts:
            routing_of(folder)


def check_lengths(config: RunConfig, models: Mapping[str, Path]) -> None:
    """Whether episodes fit into the contexts of the models that play them. Raises ConfigError."""
    for name, folder in models.items():
        longest = _context_tokens(config.policies[name], context_tokens(read_model_config(folder)))
        for where, limits in _limits(config, name):
            check_context(where, limits, longest, folder)


def check_context(where: str, limits: LimitsConfig, longest: int | None, model: Path) -> None:
    """Whether episodes fit into a model's context. Raises ConfigError."""
    if longest is not None and limits.max_context_tokens > longest:
        raise ConfigError(
            f"{where}.max_context_tokens is {limits.max_context_tokens}, and the context of {model} has {longest} "
            f"tokens; set {where}.max_context_tokens to {longest} or less"
        )


def _limits(config: RunConfig, policy: str) -> Iterator[tuple[str, LimitsConfig]]:
    """What bounds a policy's contexts, by the name of its section."""
    if (own := config.policies[policy].limits) is not None:
        yield f"policies.{policy}.limits", own
        return
    for name, section in config.environments.items():
        if policy in config.agents_of(name).values():
            yield f"environments.{name}.limits" if section.limits else "rollout.limits", config.limits_of(name)


def _context_tokens(policy: PolicyConfig, of_model: int | None) -> int | None:
    """What the policy's engines take. An option of SGLang goes before what the model says, one of ours below it."""
    args = {} if isinstance(policy.engine, AttachedEngineConfig) else policy.engine.args
    option = {key.replace("_", "-"): value for key, value in args.items()}.get("context-length")
    if type(option) is not int:
        return of_model
    return min(option, of_model or option) if isinstance(policy.engine, EmbeddedEngineConfig) else option


def _check_adapters(name: str, policy: PolicyConfig, files: ModelFiles) -> None:
    lora = policy.trainer.lora
    if lora is None or policy.frozen:
        return
    missing = [target for target in lora.target_modules if not any(f".{target}." in tensor for tensor in files.tensors)]
    if missing:
        raise ConfigError(
            f"policies.{name}.trainer.lora.target_modules: the model at {files.folder} has no layers "
            f"{', '.join(missing)}; give names of its linear layers, such as `agentrl model check` lists"
        )


def _check_engine(where: str, policy: PolicyConfig, is_evaluated: bool) -> None:
    match policy.engine:
        case EmbeddedEngineConfig():
            _check_embedded(f"{where}.engine.args", policy, policy.engine)
        case SGLangEngineConfig():
            _check_sglang(f"{where}.engine", policy.engine, policy.engine.count + is_evaluated)
        case AttachedEngineConfig():
            variable = policy.engine.token_variable
            if variable is not None and not os.environ.get(variable):
                raise ConfigError(
                    f"{where}.engine.token_variable: the environment variable {variable} is not set; export it with "
                    "the engines' token"
                )


def _check_embedded(where: str, policy: PolicyConfig, config: EmbeddedEngineConfig) -> None:
    values = {key.replace("-", "_"): value for key, value in config.args.items()}
    options = parse_engine_options({"model": policy.model, "port": 0, **values}, where)
    kind, _, number = options.device.partition(":")
    if kind == "cuda":
        wanted = 1 + int(number) if number.isdigit() else 1
        _check_gpus(wanted, f"{where}.device is {options.device}", f"{where}.device")
    lora = policy.trainer.lora
    if lora is not None and lora.rank > options.updates.max_lora_rank:
        raise ConfigError(
            f"trainer.lora.rank is {lora.rank}, and the engines take {options.updates.max_lora_rank}; lower it, or "
            f"raise {where}.max_lora_rank"
        )


def _check_sglang(where: str, config: SGLangEngineConfig, num_servers: int) -> None:
    if shutil.which(config.command[0]) is None:
        raise ConfigError(
            f"{where}.command: there is no program {config.command[0]}; give the path of a Python that has SGLang"
        )
    if config.devices and len(config.devices) < num_servers:
        raise ConfigError(
            f"{where}.devices has {len(config.devices)} entries for {num_servers} servers; give one for each engine, "
            "and one for the evaluation's"
        )


def _check_gpus(wanted: int, what: str, option: str) -> None:
    """Raises ConfigError if this machine shows fewer GPUs; where it does not show how many, torch says it later."""
    found = visible_gpus()
    if found is not None and wanted > found:
        remedy = f"lower {option}" if found else 'set it to "cpu"'
        raise ConfigError(f"{what}, and this process sees {found} GPUs; {remedy}, or run where there are more")


def visible_gpus(devices: Path = Path("/dev")) -> int | None:
    """GPUs that a process may use here, by the files of their drivers; None where these do not tell how many."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    listed = None if chosen is None else len([part for part in chosen.split(",") if part.strip() not in ("", "-1")])
    nodes = [path.name for pattern in _GPU_NODES for path in devices.glob(pattern)]
    if not nodes or listed == 0:
        return 0
    if not all(re.fullmatch(r"nvidia\d+", name) for name in nodes):
        return listed
    return len(nodes) if listed is None else min(len(nodes), listed)


def _check_target(what: str, target: str) -> None:
    """Whether a module of the name lies where this process or its children look. Imports nothing."""
    module, _, attribute = target.partition(":")
    top = module.partition(".")[0]
    is_named = all(part.isidentifier() for part in (*module.split("."), *attribute.split(".")))
    if not is_named:
        raise ConfigError(f"{what} is not of the form module:attribute; `agentrl env list` has the registered names")
    # Worker processes look into the working folder, too, where a command need not.
    is_there = top in sys.modules or importlib.util.find_spec(top) or PathFinder.find_spec(top, [os.getcwd()])
    if not is_there:
        raise ConfigError(f"{what}: there is no module {top}; install its package, or correct the name")
