# SPDX-License-Identifier: Apache-2.0
# Each target sets up what it needs in a virtual environment of its own: nothing but Python and make must be there before.
#
#   make demo    train a convolutional network on handwritten digits      make check   lint, format, types, import layers
#   make test    the whole test suite; ARGS="tests/nn -k norm" narrows    make bench   training steps against plain JAX
#   make fuzz    the random proofs of tests/laws, forty times as long
#   make parity  layers and models against other libraries, asked anew      make peers   training steps beside Flax NNX and Equinox
#
# PYTHON=python3.13 VENV=.venv-newest picks another interpreter: 3.11 gets the oldest supported JAX, 3.12 and later the newest.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: demo test fuzz parity parity-packages peers check fix bench examples setup clean

demo: $(VENV)/.ready
	$(VENV)/bin/python examples/digits/train.py $(ARGS)

# Beyond four workers the compilations of one test get in the way of another's more than the workers help.
test: $(VENV)/.ready
	$(VENV)/bin/python -m pytest -q -n $(WORKERS) --maxprocesses=4 --dist worksteal $(ARGS)

fuzz: $(VENV)/.ready
	TETHER_FUZZ=40 $(VENV)/bin/python -m pytest -q -n $(WORKERS) --maxprocesses=4 --dist worksteal $(or $(ARGS),tests/laws/test_programs.py \
		tests/laws/test_trees.py tests/laws/test_interrupts.py tests/laws/test_transforms.py)

# The other libraries come on top of the oldest lane, so Python 3.11.
parity-packages: requirements/oldest.txt requirements/parity.txt
	$(MAKE) --silent VENV=.venv-parity .venv-parity/.ready
	.venv-parity/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/parity.txt

parity: parity-packages
	.venv-parity/bin/python -m tests.parity.make $(or $(ARGS),--check)
	$(if $(ARGS),,.venv-parity/bin/python -m pytest -q tests/interop tests/zoo)

peers: parity-packages
	.venv-parity/bin/python -m benchmarks.peers $(ARGS)

check:
	@VENV=$(VENV) PYTHON=$(PYTHON) tools/check

fix:
	@VENV=$(VENV) PYTHON=$(PYTHON) tools/check --fix

bench: $(VENV)/.ready
	$(VENV)/bin/python -m benchmarks.step $(ARGS)

examples: $(VENV)/.ready
	@for program in examples/reports/*.py; do echo "== $$program"; $(VENV)/bin/python $$program || exit 1; done

setup: $(VENV)/.tools

clean:
	rm -rf .venv .venv-newest .venv-parity build dist *.egg-info .hypothesis .import_linter_cache .pytest_cache .ruff_cache
	find tether tests tools benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# Made from nothing each time, so that no package of an earlier set of pins is left in it.
$(VENV)/.ready: pyproject.toml requirements/oldest.txt requirements/newest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Tether needs Python 3.11 or newer; name one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	lane=$$($(VENV)/bin/python -c 'import sys; print("oldest" if sys.version_info < (3, 12) else "newest")') && \
		$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/$$lane.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

$(VENV)/.tools: $(VENV)/.ready requirements/tools.txt
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check -r requirements/tools.txt
	@touch $@
