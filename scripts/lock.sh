#!/usr/bin/env bash
# Resolves the tested set for Python 3.11 to 3.13: constraints.txt, and requirements.lock with the hash of every file.
# Versions in constraints.txt stay where they fit. To move one: scripts/lock.sh --upgrade-package 'NAME==VERSION'
# Then `make setup test` with each Python. Needs uv (https://docs.astral.sh/uv), which setup doesn't.
set -euo pipefail
cd "$(dirname "$0")/.."
tools='# Only for'
options=(--universal --python-version 3.11 --extra dev --no-header --no-annotate --quiet)
new=$(mktemp -d)
trap 'rm -rf "$new"' EXIT

cp constraints.txt "$new/constraints.txt" # uv takes the versions of a file that it is to replace
uv pip compile pyproject.toml "${options[@]}" --output-file "$new/constraints.txt" "$@" > "$new/out"
uv pip compile pyproject.toml "${options[@]}" --constraints "$new/constraints.txt" --generate-hashes \
    --output-file "$new/requirements.lock" > "$new/out"
# Of the markers only those of a Python version stay: Linux, CPython and Python below 3.14 go without saying.
sed -i -E -e "s/ ; \(*platform.*'(\)*( \\\\)?)$/\2/; s/('[0-9.*]+') and .*'\)*( \\\\)?$/\1\2/; s/ ; python_full_version < '3.14'//" \
    "$new/constraints.txt" "$new/requirements.lock"
{
    sed -n '1,/^[^#]/{/^#/p}' constraints.txt
    cat "$new/constraints.txt"
    sed -n "/^$tools/,\$p" constraints.txt
} > "$new/whole.txt"
mv "$new/whole.txt" constraints.txt
mv "$new/requirements.lock" requirements.lock
