# Every target sets up what it needs. `make help` lists them.

PYTHON ?= python3
BIN := .venv/bin
# Touched when the environment is complete; older than pyproject.toml means: install again.
READY := .venv/.ready
# Touched when what `make demo` needs is there.
DEMO_READY := .venv/.demo-ready
# The oldest Python gets the oldest dependencies we promise, the others the newest.
OLDEST := 3.10
# The Pythons that CI runs the fast tests on besides its own, with each quarter of the slow tests.
PYTHONS_0 := $(OLDEST)
PYTHONS_1 := 3.14
PYTHONS_2 := 3.15
PYTHONS_3 := 3.12 3.13
# Tests mostly wait, so more of them run at a time than there are cores.
WORKERS ?= 4
# What of the slow tests CI runs: one quarter, chosen by the commit.
QUARTER ?= $(shell echo $$((0x$$(git rev-parse --short=8 HEAD) % 4)))
RESULTS := .cache/results
REVERB_TESTS := tests/launchpad_lite/test_reverb.py tests/launchers/test_reverb.py \
  tests/examples/test_replay.py
BACKENDS_TESTS := tests/courier/test_tensors.py tests/launchpad_lite/engines/test_map_reduce.py \
  tests/examples/test_architecture_search.py tests/examples/test_control_agent.py \
  tests/examples/test_gan.py tests/examples/test_image_classification.py \
  tests/examples/test_reasoning.py tests/launchpad_lite/replicas
comma := ,

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

# Runs tests of the given tiers: first those that want the machine for themselves (5: there are
# none; no fast one does), then the others, several at a time. A worker that dies ends the run:
# pytest-xdist 3.8 does not always give its tests to another, and then waits for ever.
#   $(1): the Python; $(2): the tiers, for -m; $(3): the name of the results; $(4): more options
define run-tests
@mkdir -p $(RESULTS); code=0; \
test '$(2)' = fast || $(1) -m pytest -m '($(2)) and serial' \
  --junitxml=$(RESULTS)/$(3)-serial.xml $(4) || test $$? = 5 || code=1; \
$(1) -m pytest -m '($(2)) and not serial' -n $(WORKERS) --dist loadgroup --max-worker-restart=0 \
  --junitxml=$(RESULTS)/$(3).xml $(4) || code=1; \
exit $$code
endef

# Every process that a test starts would compile all of it again.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PRECIOUS: .venv-%/.ready
.PHONY: help demo docs test fast beds quarter everything everything-main backends reverb acme chaos fuzz lint types protos \
  dist release image benchmark benchmark-peers clean

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z%-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' Makefile

# An environment that is there already, with everything, serves the demo as well.
$(DEMO_READY): pyproject.toml
	$(check-python)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@test $(READY) -nt $< || $(BIN)/python -m pip install -qq --editable '.[demo]'
	@touch $@

$(READY): pyproject.toml
	$(check-python)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -qq --editable '.[dev]'
	@touch $@

# The Python $(1) in a folder of its own
define make-venv
@python=$$(.ci/find-python $(1)) || { echo "This machine has no Python $(1)" >&2; exit 1; }; \
  test -x $(@D)/bin/python || $$python -m venv $(@D)
endef

# The same with what tests need; $(2): options of pip; $(3): more extras
define make-environment
$(call make-venv,$(1))
$(@D)/bin/python -m pip install -qq $(2) --editable '.[dev$(3)]'
@touch $@
endef

define check-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
  echo "launchpad-lite needs Python 3.10 or newer; '$(PYTHON)' is" \
    "$$($(PYTHON) --version 2>/dev/null || echo 'not a Python that runs')." \
    "Say which one to use: make PYTHON=python3.12" >&2; \
  exit 1; }
endef

demo: $(DEMO_READY) ## Learn to balance a pole with actors and a learner, each a process
	$(BIN)/python -m examples.actor_learner.launch --max-seconds=50

test: lint types fast ## Check lint, types, contracts, and run the fast tests
ifeq ($(CI),true)
	@$(MAKE) --no-print-directory beds
	@$(MAKE) --no-print-directory quarter QUARTER=$(QUARTER)
	@$(MAKE) --no-print-directory $(PYTHONS_$(QUARTER):%=fast-%)
endif

fast: $(READY) ## Run the fast tests
	$(call run-tests,$(BIN)/python,fast,fast)

# One that is newer than this machine is found in a folder of Debian unstable.
fast-%: ## Run the fast tests on another Python: make fast-3.12 (fast-3.14: as root, with debootstrap)
	@.ci/find-python $* >/dev/null || in=.ci/in-sid; $$in $(MAKE) --no-print-directory tests-on-$*

tests-on-%: .venv-%/.ready
	@echo "== Python $*"
	$(call run-tests,.venv-$*/bin/python,fast,fast-$*)

beds: $(READY) ## Run a few tests on real host engines: SSH, Slurm, pods (as root)
	$(call run-tests,$(BIN)/python,bed,beds)

# Dask and Spark, Reverb, Acme and the documentation take their turns with the quarters.
quarter: $(READY) ## Run a quarter of the slow tests: make quarter QUARTER=0
	@echo "== Slow tests, quarter $(QUARTER) of 0 to 3"
	$(call run-tests,$(BIN)/python,slow,quarter-$(QUARTER),--quarter=$(QUARTER))
ifeq ($(QUARTER),0)
	@$(MAKE) --no-print-directory backends
endif
ifeq ($(QUARTER),1)
	@$(MAKE) --no-print-directory reverb
endif
ifeq ($(QUARTER),2)
	@$(MAKE) --no-print-directory docs
	@$(MAKE) --no-print-directory acme
endif

everything: lint types ## Run all tests on all Pythons; sums them up in .cache/everything.xml
	@rm -rf $(RESULTS)
	@$(MAKE) --no-print-directory --keep-going everything-main backends reverb acme \
    $(foreach quarter,0 1 2 3,$(PYTHONS_$(quarter):%=fast-%)); \
	  code=$$?; $(BIN)/python -m tests.summary $(RESULTS) .cache/everything.xml && exit $$code

everything-main: $(READY)
	$(BIN)/python -m pip install -qq atheris
	$(call run-tests,$(BIN)/python,fast or bed or slow or long,main)

# TensorFlow, which comes with it, wants older packages than we do.
reverb: .venv-reverb/.ready ## Run the tests that need Reverb, on Python 3.11 (2 GB)
	@echo "== Reverb"
	$(call run-tests,.venv-reverb/bin/python,fast or slow,reverb,$(REVERB_TESTS))

reverb: export REVERB := required

backends: .venv-backends/.ready ## Run the tests that need Dask, Spark with Java, PyTorch or JAX (2 GB)
	@echo "== Dask, Spark, PyTorch and JAX"
	$(call run-tests,.venv-backends/bin/python,fast or slow,backends,$(BACKENDS_TESTS))

backends: export BACKENDS := required

acme: .venv-acme/.ready ## Run an agent of Acme, with what it needs, on Python 3.10 (2 GB)
	@echo "== Acme"
	$(call run-tests,.venv-acme/bin/python,slow,acme,tests/examples/test_acme.py)

acme: export ACME := required

chaos: $(READY) ## Run the tests that take minutes: chaos and soak
	$(BIN)/python -m pytest -m long -o faulthandler_timeout=0

fuzz: $(READY) ## Fuzz courier for ten minutes, guided by coverage
	$(BIN)/python -m pip install -qq atheris
	$(BIN)/python -m pytest -m long --capture=no -o faulthandler_timeout=0 -o timeout=0 \
	  tests/courier/test_guided_fuzz.py

.venv-reverb/.ready: pyproject.toml
	$(call make-environment,3.11,,$(comma)reverb)

.venv-acme/.ready: pyproject.toml examples/acme/requirements.txt
	$(call make-venv,3.10)
	$(@D)/bin/python -m pip install -qq --editable '.[testing]' --requirement examples/acme/requirements.txt \
	  hypothesis pytest-timeout pytest-xdist 'pytest<9.2'
	$(@D)/bin/python -m pip install -qq --no-deps dm-acme==0.4.0
	@touch $@

.venv-backends/.ready: pyproject.toml
	$(call make-environment,3.11,,$(comma)dask$(comma)jax$(comma)spark$(comma)torch)

.venv-%/.ready: pyproject.toml tests/oldest-requirements.txt
	$(call make-environment,$*,$(if $(filter $(OLDEST),$*),--constraint tests/oldest-requirements.txt))

lint: $(READY) ## Check style, format and the import contracts
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-logo --cache-dir .cache/import_linter

types: $(READY) ## Check types
	$(BIN)/mypy

docs: .venv-docs/.ready ## Build the documentation as a site with search, in .cache/docs
	.venv-docs/bin/sphinx-build --quiet --fail-on-warning docs .cache/docs
	@echo "The documentation is in .cache/docs/index.html"

.venv-docs/.ready: pyproject.toml
	$(check-python)
	@test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install -qq --editable '.[docs]'
	@touch $@

protos: $(READY) ## Regenerate the messages from protos/
	$(BIN)/python protos/generate.py

dist: $(READY) ## Build sdists and wheels of HEAD twice, check them, and write their checksums, in dist
	$(BIN)/python .ci/release.py build

release: $(READY) ## Make a release's commit and tag, and build it: make release VERSION=0.2.0 DRY_RUN=1
	$(BIN)/python .ci/release.py release $(or $(VERSION),$(error which one? make release VERSION=0.2.0)) \
	  $(if $(DRY_RUN),--dry-run)

image: ## Build an image for pods, to be pushed: make image IMAGE=registry/name:tag
	$(ENGINE) build --build-arg BASE=$(BASE) $(if $(PACKAGES),--build-arg PACKAGES='$(PACKAGES)') \
	  --tag $(IMAGE) --file examples/Dockerfile .

benchmark: $(READY) ## Measure how fast programs start, restart, stop and fan out; prints tables
	$(BIN)/python -m benchmarks.start
	$(BIN)/python -m benchmarks.restart
	$(BIN)/python -m benchmarks.fan_out

benchmark-peers: $(READY) ## Compare courier with its peers; writes docs/benchmarks.md (15 min, 3 GB)
	$(BIN)/python -m benchmarks

clean: ## Remove environments, caches and build products
	rm -rf .venv .venv-* .cache .hypothesis .import_linter_cache .mypy_cache .pytest_cache \
	  .ruff_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
