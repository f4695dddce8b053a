# setup | evaluation | demo | test | check | docs-check | bench. Each target makes the environment first when that is needed.
SHELL := /bin/bash
VENV ?= .venv
READY := $(VENV)/.ready
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)

.PHONY: setup evaluation demo test check docs-check bench
setup: $(READY)

$(READY): pyproject.toml constraints.txt requirements.lock scripts/setup.sh
	scripts/setup.sh $(VENV)

# lm-evaluation-harness, for tools/evaluate.py and its tests.
evaluation: $(READY)
	sed -n '/^# Only for the extra .evaluation/,$$p' constraints.txt > $(VENV)/evaluation.txt
	python -m pip install --quiet --no-deps -r $(VENV)/evaluation.txt

demo: $(READY)
	scripts/demo/run.sh

# Files are taken in the order of their names: the jobs of integration/services, which wait much, come first.
test: $(READY)
	-$(MAKE) --silent evaluation # without it the tests of evaluations are skipped
	python -m compileall -q src
	python -m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations 15

check: $(READY)
	ruff check .
	ruff format --check .
	mypy
	lint-imports
	git ls-files '*.sh' '*.sbatch' .ci/run | xargs -r shellcheck

# Links, commands and messages in the documents; a part of `make test` that takes seconds.
docs-check: $(READY)
	python -m pytest -q tests/docs -m "not integration"

# Two packages that hold tokenizers' vocabularies, and a peer of conversion; their dependencies aren't needed.
bench: $(READY)
	python -m pip install --quiet --no-deps -c constraints.txt dashscope llama-models mbridge
	for bench in tests/bench/bench_*.py; do python $$bench || exit; done
