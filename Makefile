# Every target builds the virtual environment when it is missing.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
# A worker for each core, one thread each: two thread pools on the same cores hold each other up.
TESTS  := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --dist loadfile

.PHONY: demo test check bench bench-peers bench-page bench-page-peers peers report format clean

demo: $(READY)            ## train both variants on a small Memory Horizon, print the accuracies, draw the figures
	$(BIN)/recurra demo

test: $(READY)            ## the ordinary tests, then those that go through torch.compile
	$(TESTS) -m "not slow and not compile"
	RECURRA_SHAPE_CHECKS=0 $(TESTS) -m "compile and not slow"

check: $(READY)           ## style, types, and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(READY)           ## ratios on this machine, 2 threads
	$(BIN)/python -m benchmarks

bench-peers: peers        ## the same beside gateloop-transformer and JAX, in an environment of its own
	$(VENV)-peers/bin/python -m benchmarks --peers

bench-page: $(READY)      ## time and memory over L: docs/benchmarks.md, some 20 minutes
	$(BIN)/python -m benchmarks.page

bench-page-peers: peers   ## the same page with gateloop-transformer and JAX
	$(VENV)-peers/bin/python -m benchmarks.page

report: $(READY)          ## docs/results.md and its figures from docs/results/; RUNS="runs/NAME ..." first adds runs
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
