# Every target builds the virtual environment if it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# The order of the tests and of sets: `make test SEED=N` repeats both. The examples: "explore" draws new ones.
SEED     := $(shell od -An -N2 -tu2 /dev/urandom | tr -d ' ')
EXAMPLES := repeatable
# One worker per core, with one thread each: two thread pools on the same cores slow each other down.
TESTS     = PYTHONHASHSEED=$(SEED) OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n auto \
            --dist worksteal --randomly-seed=$(SEED) --hypothesis-profile=$(EXAMPLES) --hypothesis-seed=$(SEED)

.PHONY: demo test test-all test-ten mutants check aarch64 bench bench-peers peers llama gpu-wheels faults faults-sample format clean web docs dist try-wheel

demo: $(READY)            ## train two small models on Memory Horizon, print their accuracies, draw the figures
	$(BIN)/recurra demo

test: $(READY)            ## the tests
	$(TESTS)

test-all: $(READY)        ## the tests, with those that take minutes
	$(TESTS) -m ""

mutants: $(READY)         ## break 40 places of the code, one at a time, and count those that no test notices: an hour
	$(BIN)/python -m tools.mutate

test-ten: $(READY)        ## the tests ten times, in ten orders and with new examples, up to the first failure
	for run in 1 2 3 4 5 6 7 8 9 10; do echo "run $$run of 10"; $(MAKE) test EXAMPLES=explore || exit 1; done

check: $(READY)           ## check style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

aarch64: $(READY)         ## every kernel as 64-bit ARM code under emulation (needs qemu-user and gcc-aarch64-linux-gnu)
	OMP_NUM_THREADS=1 $(BIN)/python -m tools.aarch64

docs: $(READY)            ## build the documentation site into site/, strictly: no dead link, no missing reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build -q -d site

dist: $(READY)            ## build the wheel and the sdist into dist/, and check both
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[release]"
	rm -rf dist
	$(BIN)/python -m build
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

try-wheel: dist           ## install the wheel in clean environments, one for each Python from 3.10, and try the start page there
	$(BIN)/python -m tools.try_wheel dist/*.whl

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)           ## measure speed, as ratios on this machine, 2 threads
	$(BIN)/python -m benchmarks

bench-peers: peers        ## the same with gateloop-transformer and JAX, in a separate environment
	$(VENV)-peers/bin/python -m benchmarks --peers

faults: $(READY)          ## kill runs, let disks fail, damage files, and count the losses: about an hour on one core
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults

faults-sample: $(READY)   ## a twentieth of that
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.faults --sample

web:                      ## build the explorer's page from web/ into the package; needs Node.js 20+
	cd web && npm ci --no-progress && npm run check && npm run build

llama: $(READY)           ## an environment with llama.cpp for `python -m benchmarks.llama_cpp`
	$(PYTHON) -m venv $(VENV)-llama
	$(VENV)-llama/bin/pip install -q -r benchmarks/requirements-llama.txt

gpu-wheels: $(READY)      ## fetch the wheels that benchmarks/gpu_queue.sh installs on a machine without a network
	rm -rf .gpu-wheels
	for wheel in $$(bash benchmarks/gpu_queue.sh --list); do \
		$(BIN)/python -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
		--platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
		-c constraints.txt -d .gpu-wheels $$wheel || exit 1; done
	du -sh .gpu-wheels

peers: $(READY)
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install -q -c constraints.txt -e . -r benchmarks/requirements.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install -q --no-compile -c constraints.txt -e ".[dev]"  # Python compiles what it imports
	touch $@

clean:
	rm -rf web/node_modules $(VENV) $(VENV)-peers $(VENV)-llama .gpu-wheels build dist site .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find src tests tools benchmarks -name __pycache__ -prune -exec rm -r {} +
