from __future__ import annotations

import sys
from collections.abc import Iterator

LAYERS = (
    {"cli"},
    {"jobs"},
    {"sizing"},
    {"orchestration"},
    {"gateway"},
    {"rollouts", "trainer", "engine", "checking", "serving", "scoring"},
    {"buffer", "weights", "scorers", "envs"},
    {"models", "tokens", "algorithms", "sandbox", "inference", "journal", "cluster"},
    {"config", "telemetry", "registry", "protocols", "process"},
    {"types", "codec"},
)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
# Packages that a neighbour on the same level may use, and why.
NEIGHBOURS = {
    ("codec", "types"): "encodes the records",
    ("telemetry", "config"): "has a section of recipes",
    ("telemetry", "protocols"): "names the seam that its sinks fill",
}
SHIPPED_TESTING = {"agentrl.orchestration.transcripts": {"agentrl.testing.scripted"}}
PLUGIN_SURFACE = (
    "agentrl.types",
    "agentrl.protocols",
    "agentrl.config.base",
    "agentrl.config.cache",
    "agentrl.envs.authoring",
    "agentrl.envs.definition",
    "agentrl.envs.sandboxed",
)
# Who may import an environment's code into its own process, and why.
IMPORTS_ENVIRONMENTS = {
    "agentrl.envs.worker": "is the environment's own process",
    "agentrl.envs.hosting": "for a recipe that says inline",
    "agentrl.checking.checks": "experts are functions of the package that its author checks",
    "agentrl.orchestration.warmstart": "experts are functions of the environment's package",
}
# Tests of a benchmark itself.
BENCHMARK_TESTS = {"tests.gpu.test_gpu_bench"}


def _own(module) -> Iterator[tuple[str, str, int]]:
    """Imports of our own code: package, full target, line."""
    for entry in module.imports:
        parts = entry.target.split(".")
        if parts[0] == "agentrl" and len(parts) > 1:
            yield parts[1], entry.target, entry.line


def test_every_package_has_its_layer(platform):
    packages = {module.package for module in platform} - {"", "testing"}
    assert packages <= set(LEVEL), f"give these a layer: {sorted(packages - set(LEVEL))}"


def test_imports_point_down(platform):
    breaches = []
    for module in (m for m in platform if m.package not in ("", "testing")):
        for package, target, line in _own(module):
            is_inside = package == module.package or (module.package, package) in NEIGHBOURS
            if package != "testing" and not is_inside and LEVEL[package] <= LEVEL[module.package]:
                breaches.append(f"{module.where}:{line} imports {target}")
    assert not breaches, "imports that do not point down:\n" + "\n".join(breaches)


def test_a_layer_rule_fails_for_an_import_that_points_up():
    assert LEVEL["trainer"] > LEVEL["orchestration"]
    assert LEVEL["trainer"] == LEVEL["rollouts"] == LEVEL["engine"]
    assert not any({"rollouts", "trainer", "engine"} & set(pair) for pair in NEIGHBOURS)


def test_process_knows_only_records_and_their_encoding(platform):
    for module in (m for m in platform if m.package == "process"):
        used = {package for package, _, _ in _own(module)}
        assert used <= {"process", "types", "codec"}, f"{module.where} imports {used}"


def test_types_need_only_the_standard_library_and_numpy(platform):
    allowed = set(sys.stdlib_module_names) | {"numpy", "agentrl"}
    for module in (m for m in platform if m.package == "types"):
        foreign = {entry.target.split(".")[0] for entry in module.imports} - allowed
        assert not foreign, f"{module.where} imports {foreign}"


def test_shipped_code_uses_testing_only_where_it_is_allowed_to(modules):
    for module in (m for m in modules if m.package != "testing" or not m.name.startswith("agentrl.")):
        for _, target, line in _own(module):
            allowed = SHIPPED_TESTING.get(module.name, set())
            is_allowed = any(target.startswith(f"{prefix}.") for prefix in allowed)
            assert not target.startswith("agentrl.testing") or is_allowed, f"{module.where}:{line} imports {target}"


def test_environments_and_scaffolds_use_only_what_a_plugin_may(modules):
    for module in (m for m in modules if not m.name.startswith("agentrl.") and m.name != "agentrl"):
        for _, target, line in _own(module):
            assert target.startswith(PLUGIN_SURFACE), f"{module.where}:{line} imports {target}"


def test_only_benchmarks_and_their_own_tests_import_benchmarks(test_modules):
    others = [m for m in test_modules if not m.name.startswith("tests.benchmarks") and m.name not in BENCHMARK_TESTS]
    breaches = [f"{m.where}:{e.line}" for m in others for e in m.imports if e.target.startswith("tests.benchmarks")]
    assert breaches == [], "what tests and benchmarks share belongs into tests.storms"


def test_the_platform_names_no_environment_or_scaffold(platform):
    for module in platform:
        for entry in module.imports:
            root = entry.target.split(".")[0]
            assert root not in ("agentrl_environments", "agentrl_scaffolds"), f"{module.where}:{entry.line}"


def test_environments_are_imported_only_where_they_live(platform):
    """`env list` reads entry points, and everybody else goes by descriptions."""
    loaders = {m.name for m in platform for e in m.imports if e.target == "agentrl.envs.definition.load_environment"}
    assert loaders == set(IMPORTS_ENVIRONMENTS)
    by_registry = {m.name for m in platform if "load_plugin(registry.ENVIRONMENTS" in m.text}
    assert by_registry == {"agentrl.envs.definition"}


def test_no_import_runs_in_a_circle(modules):
    names = {module.name for module in modules}
    graph = {module.name: _targets(module, names) for module in modules}
    circle = _find_circle(graph)
    assert circle is None, " -> ".join(circle or ())


def test_the_search_for_circles_finds_one():
    assert _find_circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert _find_circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None


def _targets(module, names: set[str]) -> set[str]:
    """Modules of ours that a module imports, lazily or not; typing alone makes no circle."""
    found = set()
    for entry in (e for e in module.imports if not e.is_typing):
        found.add(entry.target if entry.target in names else entry.target.rpartition(".")[0])
    return (found & names) - {module.name}


def _find_circle(graph: dict[str, set[str]]) -> list[str] | None:
    finished: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str] | None:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in finished:
            return None
        for target in sorted(graph[name]):
            if circle := visit(target, [*path, name]):
                return circle
        finished.add(name)
        return None

    return next((circle for name in sorted(graph) if (circle := visit(name, []))), None)
