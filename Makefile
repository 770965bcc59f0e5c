# Every target sets up .venv by itself when it is missing or out of date. PYTHON=python3.12 picks another Python.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
# Many containers set these. With the first, every rank of every test compiles this package anew. With the second, `print`
# writes a line and its end separately, and the lines of two ranks mix.
unexport PYTHONDONTWRITEBYTECODE PYTHONUNBUFFERED

.PHONY: setup run lab check test test-python test-restarts test-jupyter test-notebooks test-emulated-gpu matrix notebooks book wheel-check bench clean help
setup: $(READY)  ## the virtual environment, .venv

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version.split()[0] + ". Try: make PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[notebooks,examples,peers,ray,book,dev]'
	touch $@

run: $(READY)  ## train on two ranks and on one, on real text; two to three minutes
	$(BIN)/python -m ddp_tutorial run

lab: $(READY)  ## the notebooks in JupyterLab, which opens at the first
	JUPYTER_CONFIG_PATH="$(CURDIR)/notebooks/.jupyter" $(BIN)/jupyter lab $$(test $$(id -u) != 0 || echo --allow-root) notebooks/00_quickstart.ipynb  # root, as in a container

check: $(READY)  ## lint, format, types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

test:  ## all of it: check, unit and process tests, experiments through papermill, every notebook through nbval
	$(MAKE) --jobs=5 --keep-going check test-python test-restarts test-jupyter test-notebooks

# `make test` runs four groups of tests beside each other, because each waits more than it computes. RESTARTS lists tests
# that start, kill and resume whole runs, and JUPYTER those that execute notebooks or need a kernel. The lists are chosen
# so that all groups take about the same time.
RESTARTS := chaos cli launch live_nodes out_of_memory own_models peers ray restarts resume slurm starting zero
RESTARTS := $(RESTARTS:%=tests/test_%.py)
JUPYTER := book browser examples exercises kernel live live_ranks notebooks sweeps watch
JUPYTER := $(JUPYTER:%=tests/test_%.py)

# Two cores for all groups: threads of a matrix product that wait for one another should sleep. By default they spin, and
# where something else has one of the cores, two threads then took four to seven times as long as one.
test-python test-restarts test-jupyter test-notebooks: export OMP_WAIT_POLICY := PASSIVE
test-python test-restarts test-jupyter test-notebooks: export PYTHONPATH := $(CURDIR)/tests/startup

test-python: $(READY)
	$(BIN)/python -m pytest $(addprefix --ignore=,$(RESTARTS) $(JUPYTER))

test-restarts: $(READY)
	$(call run-quietly,$(BIN)/python -m pytest $(RESTARTS))

test-jupyter: $(READY)
	$(call run-quietly,$(BIN)/python -m pytest $(JUPYTER))

# The other groups can spoil what a notebook measures. One that fails is executed once more, from its first cell.
NBVAL := $(BIN)/python -m pytest -p tests.kernels --nbval --nbval-current-env --nbval-cell-timeout=600 --timeout=630 -o cache_dir=.pytest_cache/notebooks notebooks
test-notebooks: $(READY)
	$(call run-quietly,$(NBVAL) || $(NBVAL) --failed-notebooks)

# Run a command beside others: print its output when it has finished.
run-quietly = mkdir -p runs && { $(1); } > runs/$@.txt 2>&1; code=$$?; cat runs/$@.txt; exit $$code

# The ranges of pyproject.toml with the newest torch, which has CUDA, instead of the versions of constraints.txt.
EMULATED := .venv-emulated-gpu

$(EMULATED)/ready: pyproject.toml
	test -x $(EMULATED)/bin/python || $(PYTHON) -m venv $(EMULATED)
	$(EMULATED)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[notebooks]' accelerate pytest pytest-timeout hypothesis
	touch $@

test-emulated-gpu: $(EMULATED)/ready  ## the tests marked cuda, on emulated GPUs; needs gcc, and 6 GB for a CUDA build of torch; seven minutes
	$(EMULATED)/bin/python tests/emulated_gpu/run.py $(EMULATED)/bin/python -m pytest -m cuda tests/test_emulated_gpu.py $(wildcard tests/test_cuda*.py)

# nox has its own environment, so that its dependencies need no pins.
matrix:  ## a part of the tests with other versions of Python, torch and the dependencies (noxfile.py); hours, and 7 GB at a time
	test -x .nox/tool/bin/nox || { $(PYTHON) -m venv .nox/tool && .nox/tool/bin/python -m pip install --quiet nox; }
	.nox/tool/bin/nox

notebooks: $(READY)  ## execute the notebooks whose source has changed, and save them with their outputs
	$(BIN)/python -m ddp_tutorial notebooks

book: $(READY)  ## the documentation and the notebooks as a website, in book/_build/site; half a minute
	$(BIN)/python book/generate.py && $(BIN)/python book/build.py

wheel-check:  ## build the wheel, install it in an empty environment, and execute 00 there; five minutes
	PYTHON=$(PYTHON) .ci/wheel-check

bench: $(READY)  ## what the project claims about its own speed, measured
	for name in launch overhead compile ddp buckets sources accumulation checkpoint scaling debug sharded pipeline cluster ranks peers; do $(BIN)/python -m ddp_tutorial bench $$name || exit; done

clean:  ## remove everything that the other targets have made, your runs and passed exercises too
	rm -rf .venv .nox $(EMULATED) tests/emulated_gpu/_build runs notebooks/runs notebooks/deep_dives/runs notebooks/experiments/runs book/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-18s%s\n", $$1, $$2}' Makefile
