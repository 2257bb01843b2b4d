# make bench   the benchmark tables          make test   all tests          make check   lint and the heart of the tests
# Each sets up .venv first; `make setup` does only that, and nothing when nothing changed.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
# A core that is done takes tests from the other: some take half a minute.
PYTESTS := -n 2 --dist worksteal
PYTEST := $(RUN)/pytest $(PYTESTS)
STAMP := $(VENV)/.setup-done
NEWER_TRITON := 3.9.0
# Compared with, but not installed: where fla is, transformers calls its kernels, on CPUs too, and they fail.
FLA := fla-core==0.6.0
CORE_SOURCES := CMakeLists.txt $(wildcard csrc/*)
# Each operator against its specification, the checks of arguments, and what the package promises of itself.
HEART := tests/test_additions.py tests/test_import.py tests/runtime tests/ops/chunks \
    $(wildcard tests/ops/*/test_*validation.py tests/ops/*/test_*accuracy.py) tests/ops/linear_attention/test_step.py

# A constraints file given with -c does not reach pip's build environments; the variable does.
export PIP_CONSTRAINT := $(CURDIR)/constraints.txt
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Tests start some hundred processes: where no bytecode may be kept, each of them would compile all of torch's Python.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: setup bench check test test-core test-isa test-gpu-static \
    test-triton-versions test-portability test-long coverage fuzz sanitize lint format clean

setup: $(STAMP)

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(STAMP): Makefile pyproject.toml constraints.txt $(CORE_SOURCES) | $(VENV)/bin/python
	@echo "Compiling Fulmen's CPU core and installing what it needs into $(VENV): about three minutes on two cores."
	@begin=$$(date +%s); $(RUN)/pip install --quiet --no-deps --editable . & core=$$!; \
	    $(RUN)/pip install --quiet --no-deps --no-compile --requirement constraints.txt && $(RUN)/pip check --quiet && \
	    $(RUN)/pip install --quiet --no-deps --upgrade --target build/peers $(FLA) && wait $$core && \
	    echo "Installed, and the core compiled, in $$(( $$(date +%s) - begin )) s."
	@touch $@

bench: setup
	FULMEN_PEERS=$(CURDIR)/build/peers $(RUN)/fulmen bench

check: lint
	$(PYTEST) -q $(HEART)

test: setup
	$(PYTEST)
	TRITON_INTERPRET=1 $(PYTEST) -q -m "(gpu or either) and not long"
	$(MAKE) test-core test-isa OTHERS=2,3

# The builds of the core that this machine can run, the default first. Where none of them multiplies bfloat16 in tiles, or
# in pairs, tests add builds that are not installed and come next: the sources of those that do, on registers of 256 bits.
BUILDS := $(RUN)/python -c 'from fulmen.runtime.core import core; print(*(dict.fromkeys([core.isa, *core.builds]) if core else []))'
TESTED_BUILDS := $(BUILDS) | sed -E 's/^avx(512_bf16|512|2)\b/& amx_on_avx2/; s/^avx(512|2)\b/& avx512_on_avx2/'
# By their numbers, those that test-isa runs.
OTHERS := 2-
EMULATED_CORE := build/emulated/libfulmen_core.so
NATIVE_TESTS := -k native -m 'not one_build' tests/ops tests/nn

$(EMULATED_CORE): $(CORE_SOURCES) | setup
	@case "$$($(TESTED_BUILDS))" in *_on_avx2*) \
	    $(RUN)/cmake --log-level=WARNING -S . -B $(@D) -DFULMEN_ISAS="avx512_on_avx2;amx_on_avx2" && \
	    $(RUN)/cmake --build $(@D) --parallel 2 -- --silent && touch $@;; esac

# The core's own tests, in C++, for each build.
test-core: setup
	@builds=$$($(TESTED_BUILDS) | tr ' ' ';'); test -z "$$builds" || { \
	    $(RUN)/cmake --log-level=WARNING -S . -B build/core-tests -DFULMEN_TESTS=ON -DFULMEN_ISAS="$$builds" && \
	    $(RUN)/cmake --build build/core-tests --parallel 2 --target core_tests -- --silent && \
	    $(RUN)/ctest --test-dir build/core-tests --parallel 2 --output-on-failure -LE library; }

# The native backend's tests once more on each build that is not the default here; in make test, on the first two of these.
test-isa: setup $(EMULATED_CORE)
	@for isa in $$($(TESTED_BUILDS) | cut -s -d ' ' -f $(OTHERS)); do \
	    echo "FULMEN_ISA=$$isa"; \
	    case $$isa in *_on_avx2) core=FULMEN_CORE=$(CURDIR)/$(EMULATED_CORE);; *) core=;; esac; \
	    env $$core FULMEN_ISA=$$isa $(PYTEST) -q $(NATIVE_TESTS) || exit 1; \
	done

# The core and its tests with GCC's sanitizers: of memory and undefined behaviour everywhere, of threads where these are
# not OpenMP's. Python runs the core of build/sanitize in place of the one that is installed, with libstdc++ from the
# start: the sanitizer, which comes first, looks there for what throws exceptions, and without it torch's first one ends
# the process. -O1 alone contracts nothing to FMA, which the tests of exp and of products expect where there is FMA.
# A worker that ends without a word has left its reason in build/sanitize/report.*.
SANITIZER := -g -O1 -fexpensive-optimizations -fno-omit-frame-pointer -fno-sanitize-recover=all
sanitize: setup
	@set -e; builds=$$($(TESTED_BUILDS)); isas=$$(echo $$builds | tr ' ' ';'); \
	configure() { CXX=g++ $(RUN)/cmake --log-level=WARNING -S . -B $$1 -DFULMEN_TESTS=ON -DFULMEN_ISAS="$$isas" \
	    -DCMAKE_BUILD_TYPE=Sanitize -DCMAKE_CXX_FLAGS_SANITIZE="$(SANITIZER) -fsanitize=$$2"; }; \
	configure build/sanitize-threads thread; \
	$(RUN)/cmake --build build/sanitize-threads --target test_in_order -- --silent; \
	$(RUN)/ctest --test-dir build/sanitize-threads --output-on-failure -R test_in_order; \
	configure build/sanitize address,undefined; \
	$(RUN)/cmake --build build/sanitize --parallel 2 -- --silent; \
	$(RUN)/ctest --test-dir build/sanitize --output-on-failure; \
	for isa in $$builds; do \
	    echo "FULMEN_ISA=$$isa, sanitized"; \
	    LD_PRELOAD="$$(g++ -print-file-name=libasan.so) $$(g++ -print-file-name=libstdc++.so)" \
	        ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/build/sanitize/report FULMEN_ISA=$$isa \
	        FULMEN_CORE=$(CURDIR)/build/sanitize/libfulmen_core.so $(PYTEST) -q $(NATIVE_TESTS); \
	done

# The core and its C++ tests, its self-check among them, where most of them never run: with either compiler, with OpenMP
# and without; for aarch64, in an emulator; and the baseline build under valgrind. Without OpenMP little is compiled again.
# Valgrind's own memory is too small for the longest runs of instructions without a branch: it takes 25 at once.
PORTABILITY := build/portability
NEEDED := clang++=clang aarch64-linux-gnu-g++=g++-aarch64-linux-gnu qemu-aarch64=qemu-user valgrind=valgrind
test-portability: setup
	@for need in $(NEEDED); do command -v $${need%%=*} >/dev/null || missing="$$missing $${need#*=}"; done; \
	echo '#include <omp.h>' | clang++ -fopenmp -fsyntax-only -x c++ - 2>/dev/null || missing="$$missing libomp-dev"; \
	test -z "$$missing" || { echo "test-portability needs more: apt-get install$$missing" >&2; exit 2; }
	@set -e; builds=$$($(BUILDS) | tr ' ' ';'); \
	try() { folder=$(PORTABILITY)/$$1; shift; echo "$$folder $$*"; \
	    $(RUN)/cmake --log-level=WARNING -S . -B $$folder -DFULMEN_TESTS=ON "$$@"; \
	    $(RUN)/cmake --build $$folder --parallel 2 -- --silent; \
	    $(RUN)/ctest --test-dir $$folder --output-on-failure; }; \
	for compiler in g++ clang++; do for disabled in OFF ON; do \
	    try $$compiler -DCMAKE_CXX_COMPILER=$$compiler -DFULMEN_ISAS="$$builds" \
	        -DCMAKE_DISABLE_FIND_PACKAGE_OpenMP=$$disabled; \
	done; done; \
	try aarch64 -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DFULMEN_ISAS=baseline \
	    -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
	    -DCMAKE_CROSSCOMPILING_EMULATOR="qemu-aarch64;-L;/usr/aarch64-linux-gnu"; \
	for test in library calls arena_baseline conversions_baseline rows_baseline simd_baseline parallel; do \
	    echo "valgrind test_$$test"; \
	    FULMEN_ISA=baseline valgrind --quiet --error-exitcode=1 --vex-guest-max-insns=25 \
	        $(PORTABILITY)/g++/tests/core/test_$$test; \
	done

# What takes minutes, or much memory.
test-long: setup
	$(RUN)/pytest -m long
	TRITON_INTERPRET=1 $(PYTEST) -q -m "(gpu or either) and long"

# Which lines of src/fulmen the Python tests run, kernels aside (docs/trust.md). Those that are not run are listed.
coverage: setup
	$(RUN)/coverage erase
	$(RUN)/coverage run -m pytest $(PYTESTS) -q
	TRITON_INTERPRET=1 $(RUN)/coverage run -m pytest $(PYTESTS) -q -m "(gpu or either) and not long"
	$(RUN)/coverage combine --quiet
	$(RUN)/coverage report

# Random calls against float64 for SECONDS; `make fuzz SEED=7` tries others, and FUZZ_RECORD is where a run goes on.
SECONDS := 600
SEED := 0
FUZZ_RECORD := build/fuzz-$(SEED).jsonl
fuzz: setup
	@mkdir -p build
	$(RUN)/fulmen fuzz --seconds $(SECONDS) --seed $(SEED) --resume $(FUZZ_RECORD)

# Every test of a backend, on the Triton kernels in the interpreter.
test-gpu-static: setup
	TRITON_INTERPRET=1 $(PYTEST) -k triton

# A use of each kernel compiled by the pinned Triton, and by newer ones that stand before it on the path.
test-triton-versions: setup $(NEWER_TRITON:%=build/triton-%)
	$(RUN)/pytest -m triton_versions tests/lab/inspect
	@for version in $(NEWER_TRITON); do \
	    echo "triton $$version"; \
	    EXPECTED_TRITON=$$version PYTHONPATH=$(CURDIR)/build/triton-$$version \
	        $(RUN)/pytest -m triton_versions tests/lab/inspect || exit 1; \
	done

build/triton-%: | setup
	PIP_CONSTRAINT= $(RUN)/pip install --quiet --no-deps --target $@ triton==$*

lint: setup
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports
	$(RUN)/clang-format --dry-run --Werror csrc/* tests/core/*.cpp tests/core/*.h

format: setup
	$(RUN)/ruff check --fix .
	$(RUN)/ruff format .
	$(RUN)/clang-format -i csrc/* tests/core/*.cpp tests/core/*.h

clean:
	rm -rf $(VENV) build
