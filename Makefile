# `make serve` and `make test` each build what they need in .venv; a second run starts at once.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export Q ?= What is the capital of Canada?

.PHONY: serve test exactness sanitize reliability lint ask train clean

# Options of `penstock serve`: make serve ARGS="--port 9000 --model /path/to/a/checkpoint"
serve: .venv/ready
	@exec $(BIN)/penstock serve $(ARGS)

test: .venv/tools lint
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

exactness: .venv/tools
	PENSTOCK_EXACTNESS_SCHEDULES=10000 $(BIN)/python -m pytest -s tests/test_exactness.py

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: .venv/tools
	$(PIP) --no-deps --target build/sanitize --upgrade --config-settings=cmake.define.PENSTOCK_SANITIZE=ON .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python tests/sanitized.py build/sanitize tests/test_ops.py

reliability: .venv/tools
	$(BIN)/python benchmarks/reliability.py

lint: .venv/tools
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

ask: .venv/ready
	@$(BIN)/penstock generate --chat --temperature 0 "$$Q"

train: .venv/tools
	$(BIN)/python examples/demo_model/train.py all --out build

# The exact torch release is named so that a CPU machine takes its CPU build where one is at hand.
.venv/ready: pyproject.toml CMakeLists.txt $(wildcard csrc/*)
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PIP) torch==2.13.0
	$(PIP) --editable .
	touch $@

.venv/tools: .venv/ready
	$(PIP) --group test
	touch $@

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
