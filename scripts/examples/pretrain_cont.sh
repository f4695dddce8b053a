#!/usr/bin/env bash
# Continues what pretrain.sh began, with the variables at its top, from the newest complete checkpoint.
set -euo pipefail
export PRETRAIN_CONTINUES=yes
exec "$(dirname "${BASH_SOURCE[0]}")/pretrain.sh" "$@"
