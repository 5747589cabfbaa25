# Two commands that work on a fresh machine with Python 3.11+ and make:
#   make simulate   create the environment, run the main job on the embedded photographs, print the path of the report
#   make test       create the environment, run the tests (make test-fast: without the slow ones)
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: simulate test test-fast tables lint clean

simulate: $(STAMP)
	$(RUN) -m fedmjp.simulate --clients 8 --defense mjp $(ARGS)

# A process a core with one thread each: small tensors gain nothing from a second thread.
TEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile

test: $(STAMP)
	$(TEST) $(ARGS)

test-fast: $(STAMP)
	$(TEST) -m "not slow" $(ARGS)

# Tables in results/ and Markdown blocks in README.md and docs/, from the committed rows.
tables: $(STAMP)
	$(RUN) benchmarks/render.py $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

$(STAMP): setup.cfg pyproject.toml
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --editable ".[test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build *.egg-info
