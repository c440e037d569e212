# Everything a developer runs. `make` alone lists the targets.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
PROTOS_BIN := .venv-protos/bin
PROTOS_INSTALLED := .venv-protos/.installed
NODE_INSTALLED := $(if $(wildcard tests/node/package.json),tests/node/node_modules/.installed)

# The prompt reaches the shell as an environment variable, taken as it is: neither make nor the
# shell parses what is in it.
PROMPT ?= Write a Python function that reverses a string.
override PROMPT := $(value PROMPT)
export PROMPT

# One thread a test process: two of them run side by side.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/pytest -n 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo test test-fast chaos audit lint format protos

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile

install: $(INSTALLED) ## Install specdec and its tools into .venv

demo: install ## Pull small models and generate from PROMPT, speculatively
	@$(BIN)/specdec demo --prompt "$$PROMPT"

test: lint $(NODE_INSTALLED) ## Lint, then run every test
	$(PYTEST)

test-fast: install $(NODE_INSTALLED) ## Run the tests that are not slow
	$(PYTEST) -m "not slow"

chaos: install ## Run the tests of faults in their long form (half an hour)
	SPECDEC_CHAOS_LONG=1 OMP_NUM_THREADS=1 $(BIN)/pytest -s tests/faults tests/test_chaos.py

audit: ## Look the dependencies up in the databases of known vulnerabilities
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/pip install -qq "pip-audit>=2.9,<3"
	.venv-audit/bin/pip-audit -r constraints.txt --no-deps --disable-pip

lint: install $(PROTOS_INSTALLED) ## Check style, types, import rules, protos and generated code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint protos
	scripts/check_breaking.sh $(BIN)/buf
	scripts/generate_stubs.sh $(PROTOS_BIN) --check

format: install ## Fix style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(PROTOS_INSTALLED) ## Generate specdec/v1 from protos/
	scripts/generate_stubs.sh $(PROTOS_BIN)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; set PYTHON to it."; exit 1; }
	@echo "Installing specdec and its dependencies into .venv (PyTorch is large: minutes at first)"
	@$(PYTHON) -m venv .venv
	@$(BIN)/pip install -qq --disable-pip-version-check -c constraints.txt -e ".[all,dev]"
	@touch $@

$(PROTOS_INSTALLED): protos/requirements.txt
	@echo "Installing the stub generators into .venv-protos"
	@$(PYTHON) -m venv .venv-protos
	@$(PROTOS_BIN)/pip install -qq --disable-pip-version-check -r protos/requirements.txt
	@touch $@

# Node.js is only for one test, which is skipped without it.
tests/node/node_modules/.installed: tests/node/package.json tests/node/package-lock.json
	@if command -v npm >/dev/null; then \
		echo "Installing the Node.js test client"; \
		npm ci --silent --prefix tests/node && touch $@; \
	else \
		echo "npm is missing: the test of the Node.js client cannot run"; \
	fi
