# Two commands that work on a fresh machine with Python 3.11+ and make:
#   make simulate   create the environment, run the main job on the embedded photographs, print the path of the report
#   make test       create the environment, run the tests (make test-fast: without the slow ones; make test-all: with the
#                   long ones, which repeat whole tables, pages and commands)
# make notebook runs examples/audit.ipynb from top to bottom, make docs builds the documentation into site/,
# make lint checks style and format, make fuzz sends 100,000 malformed and lying replies, make crash resumes commands
# from what a SIGKILL leaves at each of their file operations, make deployment-test runs a deployment on loopback.
# constraints.txt holds the versions that are installed.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed
# The tested versions; `make CONSTRAINTS= ...` installs the newest that setup.cfg allows (another Python may need it).
CONSTRAINTS := constraints.txt

# Bytecode is kept even where the environment says otherwise (containers often do): without it every process would compile
# PyTorch anew, which doubles the time of a start, and of the tests.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: simulate test test-fast test-all fuzz crash deployment-test constraints notebook tables lint docs clean

simulate: $(STAMP)
	$(RUN) -m fedmjp.simulate --clients 8 --defense none mjp:gamma=0.1 mjp:gamma=0.9 --budget 3s $(ARGS)

# A process a core with one thread each: small tensors gain nothing from a second thread.
TEST := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest -n auto --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(TEST) -m "not long" $(ARGS)

test-fast: $(STAMP)
	$(TEST) -m "not slow and not long" $(ARGS)

test-all: $(STAMP)
	$(TEST) $(ARGS)

# Malformed and lying replies to the server, to a Watcher and to an audited federation: many more than the tests send.
fuzz: $(STAMP)
	FEDMJP_FUZZ=100000 $(TEST) tests/federation/test_fuzz.py $(ARGS)

# One command after the other, or some: make crash ARGS="--command train --kill" (with --kill, a process for each).
crash: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m tests.crash $(ARGS)

# A SuperLink and SuperNodes on loopback, with TLS and keys: refused nodes, killed nodes, a killed SuperLink (minutes).
deployment-test: $(STAMP)
	FEDMJP_DEPLOYMENT=1 HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest tests/examples/test_deployment.py $(ARGS)

# After new versions have passed the tests.
constraints:
	@grep '^#' constraints.txt > constraints.new
	@$(RUN) -m pip freeze --exclude-editable | grep -vE '^(nvidia-|cuda-|triton)|@' >> constraints.new
	mv constraints.new constraints.txt

# Runs it in a kernel of its own; the file keeps no outputs.
notebook: $(STAMP)
	HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 $(RUN) -m pytest --nbmake examples/audit.ipynb

# Tables in results/ and Markdown blocks in README.md and docs/, from the committed rows.
tables: $(STAMP)
	$(RUN) benchmarks/render.py $(ARGS)

lint: $(STAMP)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

# Strict: a broken link or a missing picture fails the build. Needs no network once the environment is installed.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(RUN) -m mkdocs build --strict

# Modules are compiled when they are imported first: compiling all of them here would double the time.
$(STAMP): setup.cfg pyproject.toml $(CONSTRAINTS)
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet --no-compile $(addprefix --constraint ,$(CONSTRAINTS)) --editable ".[federation,test]"
	touch $(STAMP)

clean:
	rm -rf $(VENV) build site *.egg-info
