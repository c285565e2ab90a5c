.DEFAULT_GOAL := help
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
# The first Python that is new enough; `make PYTHON=/path/to/python3.12 setup` names another.
PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13; do \
	"$$p" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo "$$p"; break; }; done)
# Tests start hundreds of Pythons: each would compile our modules again.
unexport PYTHONDONTWRITEBYTECODE

##@ Start here
.PHONY: help
help: ## Show this list
	@awk 'BEGIN { FS = ":.*## " } /^##@ / { printf "\n%s\n", substr($$0, 5) } \
		/^[a-z0-9-]+:.*## / { printf "  make %-17s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# A Python that the command names makes .venv again if .venv has another version.
version_of = $(shell $(1) -c 'import sys; print(*sys.version_info[:3], sep=".")' 2>/dev/null)
ifeq ($(origin PYTHON),command line)
OTHER_PYTHON := $(if $(filter $(call version_of,"$(PYTHON)"),$(call version_of,$(BIN)/python)),,other-python)
endif
.PHONY: other-python
comma := ,
# Extras are separated by `+`. pip's output goes to a file, whose end is printed if pip fails.
install = $(BIN)/python -m pip install --progress-bar off --disable-pip-version-check -c constraints.txt -e '.[$(subst +,$(comma),$(1))]' \
	>$(VENV)/install.log 2>&1 || { tail -n 40 $(VENV)/install.log >&2; \
	echo "make: pip could not install the packages: see above, and all of its output in $(VENV)/install.log" >&2; exit 2; }

.PHONY: setup
setup: $(VENV)/.installed ## Make the virtual environment .venv with everything that Tidemark and its tests need

$(VENV)/.installed: $(VENV)/.local
	@echo "installing what tests and documentation need into $(VENV) (0.8 GB of disk)"
	@$(call install,local+dev)
	@touch $@

# What users need. .venv is made again if its first installation did not end.
$(VENV)/.local: pyproject.toml constraints.txt $(OTHER_PYTHON)
	@if [ -n "$(OTHER_PYTHON)" ] || [ -e $(VENV)/.unfinished ] || ! $(BIN)/python -m pip --version >/dev/null 2>&1; then \
		[ -n "$(PYTHON)" ] && "$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
			|| { echo "make: Python 3.11 or newer is needed: install it (Debian, Ubuntu: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3.11 ..." >&2; exit 2; }; \
		"$(PYTHON)" -m venv --clear $(VENV) || { rm -rf $(VENV); echo "make: $(PYTHON) cannot make virtual environments (Debian, Ubuntu: apt-get install python3-venv)" >&2; exit 2; }; \
		touch $(VENV)/.unfinished; \
	fi
	@echo "installing into $(VENV) (downloads 0.7 GB and takes 1.2 GB of disk, once)"
	@$(call install,local)
	@rm -f $(VENV)/.unfinished
	@touch $@

.PHONY: run
run: $(VENV)/.local ## Run the whole local stack with a demo: several writers whose facts complete out of order
	@exec $(BIN)/tidemark up --demo

.PHONY: up
up: $(VENV)/.local ## Run the whole local stack without the demo, for facts of your own
	@exec $(BIN)/tidemark up

##@ Check
# One more than cores, because some tests wait; at most four, because each takes three seconds to load them all.
UNIT_PROCESSES = $(shell $(BIN)/python -c 'import os; print(min(os.cpu_count() + 1, 4))')

.PHONY: test-unit
test-unit: setup ## Run the tests that need no server, and build or compile nothing
	$(BIN)/pytest -m "not server and not slow and not registry and not builds" --hypothesis-profile quick -n $(UNIT_PROCESSES) --durations 10

# A test that hangs fails with its name and the place where it stood, and the others go on. If it cannot even be
# interrupted, its process ends.
HANGS = --timeout $(1) -o faulthandler_timeout=$(2) -o faulthandler_exit_on_timeout=true
.PHONY: test
test: setup ## Run the tests, with real servers, in four processes with servers of their own
	$(BIN)/pytest -m "not slow" $(call HANGS,600,900) -n 4 --dist loadfile --no-loadscope-reorder --durations 15

.PHONY: test-slow
test-slow: setup ## Run the tests that take half a minute or more each: kills at every step, simulations, installations
	$(BIN)/pytest -m "slow and not alone" $(call HANGS,900,1200) -n 4 --dist loadfile --no-loadscope-reorder --durations 15
	$(BIN)/pytest -m alone $(call HANGS,900,1200) -n 0

.PHONY: cluster-test
cluster-test: setup ## Run the pipeline on a Spark cluster of two workers, one of which dies (a minute and a half; needs unshare)
	$(BIN)/pytest tests/cluster

.PHONY: environments-test
environments-test: setup ## Start the local stack in each kind of shell, home and user that people have, one by one (half an hour)
	$(BIN)/pytest -n 0 --timeout 3600 -o faulthandler_timeout=1800 tests/app/check_environments.py

.PHONY: languages-test
languages-test: setup ## Run writers and readers of docs/how-to in every language, kill each reader 100 times, and run the rivals of the benchmark in Java; skips what is not installed
	LANGUAGES_KILLS=$(or $(KILLS),100) $(BIN)/pytest -n 0 $(call HANGS,3600,4500) tests/services/check_registries.py tests/services/test_readers.py tests/bench/check_rivals.py

.PHONY: e2e-incidents
e2e-incidents: setup ## Run the twelve incidents of docs/how-to/runbooks on real servers, alerts included (nine minutes; needs Prometheus; INCIDENTS_WRITE=1 writes the pages again)
	$(BIN)/pytest -n 0 -o faulthandler_timeout=600 tests/incidents/test_*.py

.PHONY: chaos
chaos: setup ## Inject every fault into a stack of its own for SECONDS (600), by the script of SEED, and compare what readers received with the committed rows
	CHAOS_SECONDS=$(SECONDS) CHAOS_SEED=$(SEED) $(BIN)/pytest -s -n 0 -o faulthandler_timeout=$$(($(or $(SECONDS),600) + 900)) tests/chaos -k 'not rooms'

.PHONY: chaos-rooms
chaos-rooms: setup ## Run the rooms workload with all its faults for SECONDS (600), and compare every answer with the tables
	CHAOS_SECONDS=$(SECONDS) $(BIN)/pytest -s -o faulthandler_timeout=$$(($(or $(SECONDS),600) + 900)) tests/chaos -k rooms

.PHONY: chaos-append
chaos-append: setup ## Run the property tests of tidemark.append and its relay with forty times as many examples (half an hour)
	$(BIN)/pytest -n 2 --hypothesis-profile long tests/sources/relay

.PHONY: synapse-test
synapse-test: setup ## Publish all streams of a real Synapse for ten minutes while workers, bridges and Redis die (pip brings Synapse)
	$(BIN)/pytest -s -o faulthandler_timeout=1200 tests/sources/synapse/check_long.py

.PHONY: model-check
model-check: setup ## Check every order of events in small worlds of two writers, and of faults of a database (some minutes on two cores, 1 GB)
	$(BIN)/pytest $(call HANGS,1800,2400) -n 2 --hypothesis-profile model-check tests/model_check/test_whole_world.py tests/streaming/test_small_worlds.py tests/sources/relay/test_disorder.py::test_every_order_of_a_few_events tests/sources/relay/test_disordered_readers.py::test_readers_after_every_order_of_a_few_events

.PHONY: lint
lint: setup ## Check style, types and the direction of imports
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

.PHONY: format
format: setup ## Put the code into its one format, and write the forms for threads of modules for asyncio
	$(BIN)/python -m tests.async_to_sync
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

.PHONY: docs
docs: setup chart-docs ## Write the pages that are made from code, and build the documentation site into site/
	$(BIN)/python -m tests.docs.reference
	$(BIN)/python -m tests.docs.drawings
	$(BIN)/python -m tests.sources.rooms.picture
	$(BIN)/python -m tests.contracts
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

.PHONY: pictures
pictures: setup ## Take the pictures of the live page and of the dashboard that docs/ shows
	$(BIN)/pytest tests/app/sidecar/pictures.py tests/incidents/pictures.py

##@ Ship
VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
IMAGE := tidemark:$(VERSION)
SERVICES_IMAGE := tidemark-services:$(VERSION)
# A command that is given a directory and a name, and builds the image. It may be another one where images are built elsewhere.
IMAGE_BUILD := helm/tools/build-image
IMAGE_ARGUMENTS = VERSION=$(VERSION) REVISION=$(shell git rev-parse HEAD)

.PHONY: image
image: ## Build the image with docker, podman or buildah (IMAGE=name:tag, IMAGE_ARGUMENTS="BASE=... JDK=... JRE=...")
	$(IMAGE_BUILD) . $(IMAGE) $(IMAGE_ARGUMENTS)

.PHONY: services-image
services-image: ## Build the smaller image without Spark: sidecars, relays and migrations (SERVICES_IMAGE=name:tag)
	TARGET=services $(IMAGE_BUILD) . $(SERVICES_IMAGE) $(IMAGE_ARGUMENTS)

.PHONY: dist
dist: setup ## Build the wheel and the source distribution into dist/
	$(BIN)/python -m hatchling build -d dist

.PHONY: dist-check
dist-check: dist ## Build both and check their metadata as PyPI does
	$(BIN)/python -m twine check --strict dist/tidemark_streams-$(VERSION)*

.PHONY: sbom
sbom: setup ## Write what the image is made of, and under which licences, to dist/
	helm/tools/sbom dist

.PHONY: chart-docs
chart-docs: setup ## Write the chart's README and schema from its values
	$(BIN)/python helm/tools/describe.py

.PHONY: chart-test
chart-test: setup ## Check chart and Dockerfile with every tool there is; builds the tools first (Go, some minutes, once)
	helm/tools/install
	@$(call install,local+dev+chart)
	$(BIN)/pytest tests/helm/check_chart.py tests/helm/check_package.py tests/helm/check_image.py tests/helm/test_described.py tests/helm/test_alerts_fire.py

.PHONY: chart-package
chart-package: ## Package the chart into dist/, signed if CHART_KEY names a key; docs/how-to/release.md
	helm/tools/install helm
	helm/tools/package-chart dist

.PHONY: chart-push
chart-push: chart-package ## Push the packaged chart (CHART_REGISTRY=oci://...)
	helm/tools/push-chart dist "$(CHART_REGISTRY)"

.PHONY: images-push
images-push: image services-image ## Build both images and push them (IMAGE=... SERVICES_IMAGE=... with the registry in their names)
	docker push $(IMAGE)
	docker push $(SERVICES_IMAGE)

.PHONY: version-check
version-check: ## Fail unless TAG names the version of this tree (TAG=v1.2.3)
	@[ "$(TAG)" = "v$(VERSION)" ] || { echo "make: the tag $(TAG) is not v$(VERSION), the version in pyproject.toml" >&2; exit 2; }

# Goes before every helm and kubectl, where the cluster is not to be reached from here.
KUBE_RUN :=
# A command that is given an image's name and brings it to the cluster's nodes; empty: they see it already.
IMAGE_LOAD := kind load docker-image
# helm is helm 3, helm4 is helm 4.
KUBE_HELM := helm

.PHONY: kube-test
kube-test: setup ## Install the chart on the cluster of the current context, break it, upgrade it; CONTRIBUTING.md
	helm/tools/install $(KUBE_HELM)
	$(BIN)/python -m tests.helm.cluster --run "$(KUBE_RUN)" --helm "$(KUBE_HELM)" --build "$(IMAGE_BUILD)" --load "$(IMAGE_LOAD)" $(KUBE_TEST)

.PHONY: admission-test
admission-test: setup ## Ask the API server of the current context what the chart's policy allows Spark's driver (no nodes needed)
	helm/tools/install helm
	$(BIN)/pytest -n 0 tests/helm/check_admission.py

##@ Measure
.PHONY: bench
bench: setup ## Measure Tidemark beside its alternatives, on the JVM too where Maven is, and write docs/explanation/benchmarks.md (an hour and a quarter)
	@$(call install,local+dev+bench)
	$(BIN)/python -m tests.bench

##@ Tidy up
.PHONY: clean
clean: ## Remove what was built or cached in this directory (the stack's data stays in TIDEMARK_HOME)
	rm -rf $(VENV) build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find tidemark tests -name __pycache__ -prune -exec rm -rf {} +
