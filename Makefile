# Every target builds the virtual environment if it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# One worker per core, with one thread each: two thread pools on the same cores slow each other down.
TESTS  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test check bench bench-peers bench-page bench-page-peers peers report format clean

demo: $(READY)            ## train two small models on Memory Horizon, print their accuracies, draw the figures
	$(BIN)/recurra demo

test: $(READY)            ## the tests, then those that go through torch.compile
	$(TESTS) -m "not slow and not compile"
	RECURRA_SHAPE_CHECKS=0 $(TESTS) -m "compile and not slow"

check: $(READY)           ## check style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)           ## measure speed, as ratios on this machine, 2 threads
	$(BIN)/python -m benchmarks

bench-peers: peers        ## the same with gateloop-transformer and JAX, in a separate environment
	$(VENV)-peers/bin/python -m benchmarks --peers

bench-page: $(READY)      ## measure time and memory over L for docs/benchmarks.md, about 20 minutes
	$(BIN)/python -m benchmarks.page

bench-page-peers: peers   ## the same page with gateloop-transformer and JAX
	$(VENV)-peers/bin/python -m benchmarks.page

report: $(READY)          ## build docs/results.md and its figures from docs/results/; RUNS="runs/NAME ..." adds runs first
	$(BIN)/recurra report $(if $(RUNS),--add $(RUNS))

peers: $(READY)
	$(PYTHON) -m venv $(VENV)-peers
	$(VENV)-peers/bin/pip install -q -c constraints.txt -e . -r benchmarks/requirements.txt

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --upgrade -c constraints.txt pip
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-peers build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
	find src tests benchmarks -name __pycache__ -prune -exec rm -r {} +
