# Two commands that work on a fresh machine with Python 3.11+ and make:
#   make simulate   create the environment, run the main job on the embedded photographs, print the path of the report
#   make test       create the environment, run the tests (make test-fast: without the slow ones)
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: simulate test test-fast lint clean

simulate: $(STAMP)
	$(RUN) -m fedmjp.simulate --clients 8 --defense mjp $(ARGS)

test: $(STAMP)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest $(ARGS)

test-fast: $(STAMP)
	HF_HUB_OFFLINE=1 $(RUN) -m pytest -m "not slow" $(ARGS)

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
