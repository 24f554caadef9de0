# `make demo` and `make test` each do everything on a fresh machine; run again, they only do what is new.
#   PYTHON       the interpreter to build the environment from (3.10 to 3.13)
#   TORCH_INDEX  where torch comes from when the system has none, e.g. https://download.pytorch.org/whl/cpu
#   JOBS         test processes       ARGS  more arguments for the demo, pytest or the benchmarks

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
DEMO ?= examples/08_ag_gemm.py
RANKS ?= 4
JOBS ?= 2
ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check --no-input install --quiet --no-compile

# Type checkers do not follow setup.py's mapping: show them the folders as one package.
MYPY = rm -rf .types && mkdir -p .types/tilescale && \
	ln -s $(CURDIR)/tilescale/* $(CURDIR)/compiler $(CURDIR)/comm $(CURDIR)/launch .types/tilescale/ && cd .types && \
	exec $(abspath $(PY)) -m mypy --config-file ../pyproject.toml --cache-dir ../.mypy_cache -p tilescale

.PHONY: demo test test-all bench lint types install clean

# Bytecode is made of what is imported, when it is first: pip would spend half a minute on all of torch and transformers.
# Tests start some two hundred Pythons, each of which would compile all sources again where bytecode is switched off.
demo test test-all bench: export PYTHONDONTWRITEBYTECODE :=
demo test test-all bench: export PYTHONPYCACHEPREFIX := $(abspath $(VENV))/.bytecode

demo: $(VENV)/.run
	$(VENV)/bin/tilescale launch -n $(RANKS) $(DEMO) $(ARGS)

# mypy is one process: it runs beside the tests, in front of which it would leave all cores but one idle. What it says is
# shown behind what they say.
test test-all: lint
	@($(MYPY)) >.types.log 2>&1 & types=$$!; trap 'kill $$types 2>/dev/null' INT TERM HUP; \
	$(PY) -m pytest -n $(JOBS) --dist worksteal $(if $(filter test-all,$@),-m "not bench") $(ARGS); tests=$$?; \
	wait $$types; types=$$?; cat .types.log; rm -f .types.log; exit $$(( tests ? tests : types ))

bench: $(VENV)/.test
	$(PY) -m pytest -s -m bench tests/bench $(ARGS)

lint: $(VENV)/.test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check --quiet .

types: $(VENV)/.test
	@($(MYPY))

# For people who start Python themselves, perhaps with bytecode switched off: everything, on all cores. Some packages hold
# templates that are no Python, which is no error.
install: $(VENV)/.run
	-@$(PY) -m compileall -qq -j 0 $$($(PY) -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

clean:
	rm -rf $(VENV) .types .types.log .mypy_cache .ruff_cache .pytest_cache .hypothesis build *.egg-info

# The environment sees the system's packages only where that brings the system's torch.
$(PY):
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 13) else "tilescale needs Python 3.10 to 3.13, $(PYTHON) is %d.%d: make PYTHON=python3.12" % v)'
	$(PYTHON) -m venv --clear $$($(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages) $(VENV)

$(VENV)/.torch: | $(PY)
	$(PY) -c 'import torch' 2>/dev/null || $(PIP) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) '$(TORCH)'
	@touch $@

$(VENV)/.run: pyproject.toml setup.py | $(VENV)/.torch
	$(PIP) --editable .
	@touch $@

$(VENV)/.test: pyproject.toml setup.py | $(VENV)/.torch
	$(PIP) --editable '.[test]'
	@touch $(VENV)/.run $@
