# Two commands do everything on a fresh clone: `make demo` and `make test`.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Processes that run tests side by side: `make test WORKERS=4` where there are more processors.
WORKERS ?= 2
CORE   := CMakeLists.txt $(wildcard src/narrowcast/kernels/cpu/core/*)

.PHONY: help demo test coverage lint format docs soak gpu-check gpu bench linear quality wire training sanitize clean

help:            ## say what there is
	@grep -E '^[a-z-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/: .*##/\t/' | expand -t 12

# torch comes first, by its exact version: a range would pull a GPU build where a CPU one is meant. What builds the core
# stays in the environment, so that a second install compiles nothing again.
TOOLS   := 'scikit-build-core>=0.11' $(if $(shell command -v cmake),,cmake) $(if $(shell command -v ninja),,ninja)
INSTALL := $(BIN)/pip install --quiet --no-build-isolation --editable

$(VENV)/.torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet torch==2.13.0 $(TOOLS)
	@touch $@

$(VENV)/.core: $(VENV)/.torch pyproject.toml $(CORE)
	$(INSTALL) .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(INSTALL) '.[dev]'
	@touch $@

demo: $(VENV)/.core      ## train a small GPT with compressed gradients, quantize it, show both (two minutes)
	$(BIN)/pip install --quiet 'narrowcast[plot]'
	$(BIN)/narrowcast demo

test: $(VENV)/.dev lint  ## every test that runs without a GPU, in minutes
	$(BIN)/pytest -n $(WORKERS) -m "not soak and not gpu"

# Not part of `make test`: counting lines made tests/codecs/test_conformance.py take 1.8 times the processor time.
coverage: $(VENV)/.dev   ## every test again, and which lines none of them runs
	$(BIN)/pytest -n $(WORKERS) -m "not soak and not gpu" --cov --cov-report=term

docs: $(VENV)/.dev       ## build the site into site/, with warnings as errors
	$(BIN)/mkdocs build --strict

lint: $(VENV)/.dev       ## ruff and strict mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev     ## let ruff rewrite the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

soak: $(VENV)/.dev       ## what is long or large: tensors past 2**31 elements, 10,000 rounds, aarch64 under qemu, an hour of random cases
	$(BIN)/pytest -m soak --timeout 3600
	NARROWCAST_FUZZ=60 $(BIN)/pytest tests/fuzz --timeout 7200

# On a machine that only lends its GPU, with its own Python (torch, Triton, pytest): nothing is installed or fetched, and
# nothing is timed. First what no GPU has run yet (marked `untried`), then from short to long; a part that fails or hangs
# leaves the others their turn. A session of 30 minutes, where a command may run for ten:
#   1. make gpu-check, of which ten minutes may see the first parts alone; keep what it prints: 2>&1 | tee $$OUT/log
#   2. the parts that it did not come to: make gpu-check GPU_FROM=2 (to 5)
#   3. what failed, by name, with what step 1 printed at hand; then take the marks off
# Without pytest there: pip install --target build/pytest pytest on a machine that has a network, and bring that folder.
GPU_PYTHON ?= python3
GPU_FROM   ?= 1
GPU_PYTEST := NARROWCAST_CORE=$(CURDIR)/build/gpu/_narrowcast_core.so PYTHONPATH=$(CURDIR)/src:$(CURDIR)/build/pytest timeout -k 10 \
	600 $(GPU_PYTHON) -m pytest -o addopts=-q --continue-on-collection-errors --durations 5
gpu-check:       ## the tests that need a GPU, with the Python of the machine, and no benchmark
	cmake -S . -B build/gpu -DCMAKE_BUILD_TYPE=Release
	cmake --build build/gpu --parallel
	@failed=; \
	part() { if [ $$1 -ge $(GPU_FROM) ]; then shift; $(GPU_PYTEST) -m "$$@" || failed="$$failed; $$*"; fi; }; \
	part 1 untried tests/kernels tests/optim tests/generate tests/cli/test_generate.py tests/distributed/test_nccl_ranks.py; \
	part 2 "gpu and not untried" tests/test_golden.py tests/generate tests/compat tests/kernels/operators tests/test_compile.py; \
	part 3 "not untried and not soak" tests/kernels/triton; \
	part 4 "gpu and not untried" tests/distributed; \
	part 5 "gpu and not untried" tests/nn tests/codecs tests/checkpoint; \
	test -z "$$failed" || { echo "failed: $${failed#; }"; exit 1; }

gpu: $(VENV)/.dev        ## the kernels on a real GPU: every test, and the benchmarks
	$(MAKE) gpu-check GPU_PYTHON=$(BIN)/python
	$(BIN)/python bench/gpu.py
	$(BIN)/python bench/gpu_linear.py
	$(BIN)/python bench/gpu_row.py
	$(BIN)/python bench/gpu_wide.py
	$(BIN)/python bench/nccl.py
	$(BIN)/python bench/fake.py --gpu

bench: $(VENV)/.dev      ## time the codecs against a plain copy
	$(BIN)/python bench/codec.py

linear: $(VENV)/.dev     ## time linear layers on encoded weights on the CPU, beside competitors
	$(INSTALL) '.[bench]'
	PYTHONPATH=bench $(BIN)/python bench/linear.py --end-to-end --convert
	PYTHONPATH=bench $(BIN)/python bench/linear_batches.py

quality: $(VENV)/.dev    ## what each codec leaves of a real model
	$(INSTALL) '.[bench]'
	$(BIN)/python bench/quality.py

wire: $(VENV)/.dev       ## time the collectives on a network in a box (needs root)
	$(BIN)/python bench/wire.py --out bench/results

training: $(VENV)/.dev   ## train over slow links on a network in a box, beside competitors (needs root; hours)
	$(BIN)/python bench/training.py --out bench/results

sanitize: $(VENV)/.dev   ## the native core under AddressSanitizer and UndefinedBehaviorSanitizer
	cmake -S . -B build/sanitize -DNC_SANITIZE=ON
	cmake --build build/sanitize --parallel 2
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	ASAN_OPTIONS=detect_leaks=0 NARROWCAST_CORE=$(CURDIR)/build/sanitize/_narrowcast_core.so \
	$(BIN)/pytest tests/kernels/cpu tests/kernels/operators/test_fake_quantize_operator.py \
		tests/kernels/operators/test_integer_operator.py tests/codecs/test_conformance.py

clean:           ## remove what was built
	rm -rf $(VENV) build dist site
