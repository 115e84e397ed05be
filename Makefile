# Every target sets itself up: a fresh clone needs only make and Python 3.11 or newer.

PYTHON ?= $(shell python3.11 --version >/dev/null 2>&1 && echo python3.11 || echo python3)
# Test processes: one more than two cores, since many tests wait. 0 runs the tests in one, which is easier to debug.
JOBS ?= 3
# Passed on to the program a target runs: make bench ARGS=--help
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# Hundreds of processes that the tests start would each compile everything anew.
test soak: export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test fmt bench soak clean curl java chromium

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(READY) ## Create .venv and install dibs in it with the development tools

demo: $(READY) java ## Run the demo: a producer, workers, one of them killed
	$(BIN)/dibs demo $(ARGS)

# Hundreds of processes that the tests start would each compile everything anew.
test soak: export PYTHONDONTWRITEBYTECODE :=

test: $(READY) curl java chromium ## Check format, lint, layers and types, then run the tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/mypy
	$(BIN)/pytest -n $(JOBS) $(ARGS)

fmt: $(READY) ## Format the code and apply the safe lint fixes
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: $(READY) ## Run the benchmarks
	$(BIN)/python -m bench $(ARGS)

soak: $(READY) ## Run the long tests, and the contract suite over further makes of store, one at a time
	$(BIN)/pytest -m soak --timeout 3600 $(ARGS)

clean: ## Remove .venv, caches and build output
	rm -rf $(VENV) .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache build dist
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

$(READY): pyproject.toml | $(BIN)/pip
	$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@

# pip is the last thing the venv module writes, so a half-made venv is made again.
$(BIN)/pip:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'dibs needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python'; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || $(install-venv-module)
	$(PYTHON) -m venv $(VENV)

# The pages about HTTP are tested as they are written: with curl.
curl:
	@command -v curl >/dev/null || { package=curl; what='The tests need curl.'; $(install-package); }

# Spark runs on Java 17 or newer.
java:
	@command -v java >/dev/null || [ -n "$$JAVA_HOME" ] \
	  || { package=default-jre-headless; what='The tests of Spark need Java 17 or newer.'; $(install-package); }

# The report's page is looked at in a real browser.
chromium:
	@{ command -v chromium && command -v chromedriver; } >/dev/null \
	  || { package='chromium chromium-driver'; what='The tests of the report need Chromium.'; $(install-package); }

# Debian packages ensurepip, which venv needs, apart from Python.
define install-venv-module
{ \
  package=$$($(PYTHON) -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
  what='$(PYTHON) cannot create virtual environments.'; \
  $(install-package); }
endef

define install-package
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq $$package; \
  else \
    echo "$$what On Debian: sudo apt-get install $$package"; exit 1; \
  fi
endef
