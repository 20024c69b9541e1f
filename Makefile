# `make serve` and `make test` set up .venv on their first run.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
export Q ?= What is the capital of Canada?

.PHONY: serve test test-slow test-all test-install thorough executors exactness fuzz bfcl sanitize reliability reliability-pd lint docs docs-version docs-serve ask train clean

# Options of `penstock serve`: make serve ARGS="--port 9000 --model /path/to/a/checkpoint"
serve: .venv/ready
	@exec $(BIN)/penstock serve $(ARGS)

PYTEST := $(BIN)/python -m pytest -rs --numprocesses 6 --dist loadfile

# Lint, type check and the fast tests, which cover every subject. Lint runs in parallel with the tests; its output is printed after
# them, and skipped tests are listed. The recipe calls make instead of $(MAKE), since make would run a recipe with $(MAKE) even with
# --dry-run, which tests/install uses.
test: .venv/tools
	@log=$$(mktemp); trap 'rm -f "$$log"' EXIT; \
	make --no-print-directory lint >"$$log" 2>&1 & lint=$$!; \
	$(PYTEST) -m 'not slow and not thorough' tests; tests=$$?; \
	wait $$lint; lint=$$?; cat "$$log"; [ $$tests = 0 ] && [ $$lint = 0 ]

# The other tests: more models and parameters, servers of every dialect, killed processes, compilation of GPU kernels, the wheel.
test-slow: .venv/tools
	$(PYTEST) -m 'slow and not thorough' tests

# All tests that CI runs.
test-all: test test-slow

# Tests of the wheel only.
test-install: .venv/tools
	$(BIN)/python -m pytest -rs tests/install/test_installed.py

# Tests that take minutes to hours: those that `make test` skips, and large numbers of random schedules and requests.
thorough: .venv/tools executors exactness fuzz bfcl
	$(BIN)/python -m pytest -m thorough tests
	PENSTOCK_TOGETHER_HEAPS=2000 $(BIN)/python -m pytest tests/engine/test_together.py
	PENSTOCK_PD_REQUESTS=2400 $(BIN)/python -m pytest tests/engine/test_prefill_decode.py
	PENSTOCK_SCHEMA_EXAMPLES=100 $(BIN)/python -m pytest tests/server/test_server_schema.py
	PENSTOCK_STREAMS=400 $(BIN)/python -m pytest tests/server/test_server.py
	PENSTOCK_RESUMED_ANSWERS=1080 $(BIN)/python -m pytest -s tests/server/test_resumed_answers.py
	PENSTOCK_BROKEN_CALLS=20160 $(BIN)/python -m pytest -m "" tests/server/test_tool_calls.py
	PENSTOCK_STREAM_PARTS=300 $(BIN)/python -m pytest tests/dialects/test_stream_parts.py
	PENSTOCK_SPECULATION_QUESTIONS=5 $(BIN)/python -m pytest tests/engine/test_speculation.py
	PENSTOCK_KSERVE_EXAMPLES=1000 $(BIN)/python -m pytest tests/dialects/test_kserve.py
	PENSTOCK_OPS_EXAMPLES=200 $(BIN)/python -m pytest tests/kernels/test_ops.py
	PENSTOCK_READING_EXAMPLES=1000 $(BIN)/python -m pytest tests/text/test_reading.py
	PENSTOCK_QUESTIONS=2 $(BIN)/python -m pytest tests/engine/test_llm.py
	PENSTOCK_BROKEN_CHECKPOINTS=400 $(BIN)/python -m pytest tests/models/test_broken_checkpoints.py

# The engine's tests with worker processes; `make test` runs them with workers in the engine's process.
OVER_EXECUTORS := async_llm embed engine engine_process exactness guided llm logprobs lora memory models search \
	several_models speculation storm thoughts together
executors: .venv/tools
	PENSTOCK_DISTRIBUTED_EXECUTOR_BACKEND=mp $(BIN)/python -m pytest -rs --numprocesses 2 --dist loadfile \
		$(OVER_EXECUTORS:%=tests/*/test_%.py)

# Contract 2 with every instruction set of the machine, with most schedules for the default one: in portions of 1,000 random schedules;
# `make -j2 exactness` runs two at a time. Results are in build/exactness/; portions are repeated after code changes.
exactness: .venv/tools $(foreach portion,1 2 3 4 5 6 7 8 9 10,build/exactness/$(portion).txt)
	for set in $$($(BIN)/python -c 'from penstock.ops import _kernels; print(*_kernels.available())'); do \
		PENSTOCK_ISA=$$set PENSTOCK_EXACTNESS_SCHEDULES=500 $(BIN)/python -m pytest -s tests/engine/test_exactness.py || exit 1; \
	done

build/exactness/%.txt: $(shell find src csrc tests/engine/test_exactness.py -name '*.py' -o -path 'csrc/*' -type f) | .venv/tools
	mkdir -p $(@D)
	PENSTOCK_EXACTNESS_SEED=$* PENSTOCK_EXACTNESS_SCHEDULES=1000 $(BIN)/python -m pytest -s tests/engine/test_exactness.py >$@.drawn 2>&1 \
		|| { cat $@.drawn; exit 1; }
	mv $@.drawn $@; grep ^portion $@

# 100,000 mutated requests over HTTP, and 20,000 over gRPC, in portions with separate servers and seeds, with a progress bar.
# Results are in build/fuzz/, so that an interrupted run resumes; portions are repeated after code changes.
fuzz: .venv/tools $(foreach portion,1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20,build/fuzz/$(portion).txt)
	@grep -h requests build/fuzz/*.txt

build/fuzz/%.txt: $(shell find src csrc tests/support/fuzz*.py -name '*.py' -o -path 'csrc/*' -type f) | .venv/tools
	@mkdir -p $(@D)
	PENSTOCK_FUZZ_SEED=$* PENSTOCK_FUZZ_REQUESTS=5000 $(BIN)/python -m pytest -s tests/server/test_fuzz.py >$@.drawn \
		|| { cat $@.drawn; exit 1; }
	@mv $@.drawn $@

# Tool calls of the Berkeley Function Calling Leaderboard, with and without constrained calls. Answers are in build/bfcl/, so that an
# interrupted run resumes; they are repeated after code changes.
bfcl: .venv/tools
	$(BIN)/python benchmarks/bfcl

# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer.
sanitize: .venv/tools
	PENSTOCK_SETS=all $(PIP) --no-deps --target build/sanitize --upgrade --config-settings=cmake.define.PENSTOCK_SANITIZE=ON \
		--config-settings=build-dir=build/sanitized .
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 $(BIN)/python tests/support/sanitized.py build/sanitize tests/kernels/test_ops.py \
		tests/kernels/test_random_sampling.py

reliability: .venv/tools
	$(BIN)/python benchmarks/reliability.py

reliability-pd: .venv/tools
	$(BIN)/python benchmarks/reliability_pd.py

lint: .venv/tools
	$(BIN)/python scripts/check_language.py
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/clang-format --dry-run -Werror csrc/*.h csrc/*.cc
	$(BIN)/mypy
	$(BIN)/lint-imports

# Documentation site in build/site; fails on warnings. docs-serve serves it at http://localhost:8000 and updates it on changes
# (make docs-serve ARGS="--dev-addr localhost:9000").
docs: .venv/docs
	$(BIN)/python scripts/docs build

# Adds the site as a version to build/versions, the folder to host: make docs-version VERSION=1.2
docs-version: .venv/docs
	$(BIN)/python scripts/docs build --version $(VERSION)

docs-serve: .venv/docs
	@exec $(BIN)/python scripts/docs serve $(ARGS)

ask: .venv/ready
	@$(BIN)/penstock generate --chat --temperature 0 "$$Q"

train: .venv/tools
	$(BIN)/python examples/demo_model/train.py all --out build

# The exact torch release selects its CPU build on a CPU machine, if one is available.
# Kernels are compiled in build/, which is kept for incremental builds: for this machine's instruction set to serve, and for all
# instruction sets to run tests.
.venv/ready: pyproject.toml CMakeLists.txt $(wildcard csrc/*) src/penstock/serve/web/libraries/package-lock.json
	$(PYTHON) -m venv .venv
	$(PIP) torch==2.13.0
	$(PIP) 'nanobind>=2.4' 'scikit-build-core>=1.0' $$(for tool in cmake ninja; do command -v $$tool >/dev/null || echo $$tool; done)
	PENSTOCK_SETS=$${PENSTOCK_SETS:-native} $(PIP) --no-build-isolation --editable .
	@$(BIN)/python scripts/web_libraries.py || true
	@$(BIN)/python -c 'import penstock.ops._kernels' || echo 'penstock has no CPU kernels: install a C++ compiler (apt install g++)'
	touch $@

.venv/tools: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PIP) --group test
	PENSTOCK_SETS=$${PENSTOCK_SETS:-all} $(PIP) --no-build-isolation --no-deps --editable .
	touch $@

.venv/docs: .venv/ready
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	$(PIP) --group docs
	touch $@

clean:
	rm -rf .venv dist build/docs build/site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis
