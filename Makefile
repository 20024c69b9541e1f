# `make serve` and `make test` each build what they need in .venv; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
export Q ?= What is the capital of Canada?

.PHONY: serve test exactness reliability lint ask train clean

# Options of `penstock serve`: make serve ARGS="--port 9000 --model /path/to/a/checkpoint"
serve: .venv/ready
	@exec $(BIN)/penstock serve $(ARGS)

test: .venv/ready lint
	$(BIN)/python -m pytest

exactness: .venv/ready
	PENSTOCK_EXACTNESS_SCHEDULES=10000 $(BIN)/python -m pytest -s tests/test_exactness.py

reliability: .venv/ready
	$(BIN)/python benchmarks/reliability.py

lint: .venv/ready
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

ask: .venv/ready
	@$(BIN)/penstock generate --chat --temperature 0 "$$Q"

train: .venv/ready
	$(BIN)/python examples/demo_model/train.py all --out build

# The exact torch release is named so that a CPU machine takes its CPU build where one is at hand.
.venv/ready: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	touch $@

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
