# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin
# Touched when the environment is complete; older than pyproject.toml means: install again.
READY := .venv/.ready
# Also tested in CI, where the machine has them: the oldest and the newest. Both together take half an
# hour; what lies between: make test-pythons PYTHONS=3.12
PYTHONS := 3.10 3.13
# This one gets the oldest dependencies we promise, the others the newest.
OLDEST := 3.10

# Of `make image`: what it is called, what it is built on, what is installed besides (empty: what
# nodes of the examples import), and what builds it. With a tag: clusters would pull one without it
# each time, even where it was loaded by hand. With a registry: by a short name podman means one of
# localhost, and a cluster one of docker.io.
IMAGE ?= docker.io/library/launchpad-lite:$(shell sed -n 's/^__version__ = "\(.*\)"$$/\1/p' launchpad_lite/_version.py)
BASE ?= docker.io/library/python:$(or $(MINOR),$(error '$(LAUNCHING)' is no Python that runs. Say \
  which one you launch with: make image PYTHON=python3.12))-slim
PACKAGES ?=
ENGINE ?= $(shell command -v docker >/dev/null && echo docker || echo podman)

# Code travels to the same minor version of Python only: that of the environment here, unless another
# Python is named.
LAUNCHING = $(or $(if $(filter file,$(origin PYTHON)),$(wildcard $(BIN)/python)),$(PYTHON))
MINOR = $(shell $(LAUNCHING) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)

# Tests of programs on several hosts, which need root.
BEDS := tests/beds $(addprefix tests/launchers/test_,ssh.py ssh_faults.py slurm.py kubernetes.py \
  kubernetes_faults.py)

# Every process that a test starts would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-here test-beds lint types fast-tests chaos fuzz test-pythons test-reverb \
  protos image benchmark benchmark-peers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' Makefile

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
	  echo "launchpad-lite needs Python 3.10 or newer; '$(PYTHON)' is" \
	    "$$($(PYTHON) --version 2>/dev/null || echo 'not a Python that runs')." \
	    "Say which one to use: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --editable '.[dev]'
	@touch $@

demo: $(READY) ## Learn to balance a pole with actors and a learner, each a process
	$(BIN)/python -m examples.actor_learner.launch --max-seconds=50 --output=.cache/demo

test: lint types ## Check everything: lint, types, contracts, all tests
	@$(MAKE) --no-print-directory --keep-going --jobs=2 test-here test-beds
ifeq ($(CI),true)
	@$(MAKE) --no-print-directory test-reverb
	@$(MAKE) --no-print-directory test-pythons
endif

test-here: $(READY) # What needs this machine only
	$(BIN)/python -m pytest $(addprefix --ignore=,$(BEDS))

# They mostly wait, so they run beside the others; what they say is shown at their end.
test-beds: $(READY) # What needs hosts or a cluster, which these tests make
	@mkdir -p .cache; $(BIN)/python -m pytest $(BEDS) >.cache/test-beds.txt 2>&1; code=$$?; \
	echo; echo "== Hosts and clusters"; cat .cache/test-beds.txt; exit $$code

lint: $(READY) ## Check style, format and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import_linter

types: $(READY) ## Check types
	$(BIN)/mypy

fast-tests: $(READY) ## Run the tests without those that take long
	$(BIN)/python -m pytest -m 'not slow'

chaos: $(READY) ## Run the long chaos test
	$(BIN)/python -m pytest -m chaos --capture=no -o faulthandler_timeout=0

fuzz: $(READY) ## Fuzz courier for ten minutes, guided by coverage
	$(BIN)/python -m pip install -qq atheris
	$(BIN)/python -m pytest -m fuzz --capture=no -o faulthandler_timeout=0 -o timeout=0

# An environment of its own: TensorFlow, which comes with it, wants older packages than we do.
test-reverb: ## Run the tests that need Reverb: on Python 3.11, which they bring 2 GB to
	@python=$$(.ci/find-python 3.11) || { echo "dm-reverb needs Python 3.11" >&2; exit 1; }; \
	echo "== Reverb ($$python)"; \
	{ test -x .venv-reverb/bin/python || $$python -m venv .venv-reverb; } && \
	.venv-reverb/bin/python -m pip install -qq --editable '.[dev,reverb]' && \
	REVERB=required .venv-reverb/bin/python -m pytest tests/launchpad_lite/test_reverb.py \
	  tests/launchers/test_reverb.py tests/examples/test_replay.py

# Environments one after the other, since pip writes to this folder; then tests of two at a time, which
# mostly wait. All are gone through before it fails, so that one run tells about each.
test-pythons: $(READY) ## Run the fast tests on the other Pythons this machine has
	@main=$$($(BIN)/python -c 'import sys; print("%d.%d" % sys.version_info[:2])'); found=; failed=; \
	for version in $(PYTHONS); do \
	  if [ $$version = $$main ]; then continue; fi; \
	  if ! python=$$(.ci/find-python $$version); then \
	    echo "== Python $$version: not on this machine, skipped"; continue; fi; \
	  constraint=; \
	  if [ $$version = $(OLDEST) ]; then constraint='--constraint tests/oldest-requirements.txt'; fi; \
	  { test -x .venv-$$version/bin/python || $$python -m venv .venv-$$version; } && \
	    .venv-$$version/bin/python -m pip install -qq $$constraint --editable '.[dev]' && \
	    found="$$found test-python-$$version" || failed="$$failed $$version"; \
	done; \
	if [ -n "$$failed" ]; then echo "There is no environment for Python$$failed" >&2; fi; \
	if [ -n "$$found" ]; then $(MAKE) --no-print-directory --keep-going --jobs=2 $$found || failed=x; fi; \
	test -z "$$failed"

# What it says is shown at its end: others may run beside it.
test-python-%:
	@mkdir -p .cache; .venv-$*/bin/python -m pytest -m 'not slow' >.cache/test-python-$*.txt 2>&1; code=$$?; \
	echo; echo "== Python $*"; cat .cache/test-python-$*.txt; exit $$code

protos: $(READY) ## Regenerate courier/_proto from protos/
	$(BIN)/python protos/generate.py

image: ## Build an image for pods, to be pushed: make image IMAGE=registry/name:tag
	$(ENGINE) build --build-arg BASE=$(BASE) $(if $(PACKAGES),--build-arg PACKAGES='$(PACKAGES)') \
	  --tag $(IMAGE) --file examples/Dockerfile .

benchmark: $(READY) ## Measure how fast programs start, restart, stop and fan out; prints tables
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.restart
	$(BIN)/python -m benchmarks.fan_out

benchmark-peers: $(READY) ## Compare courier with its peers; writes docs/benchmarks.md (40 min, 3 GB)
	$(BIN)/python -m benchmarks

clean: ## Remove environments, caches and build products
	rm -rf .venv .venv-* .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
	  .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
