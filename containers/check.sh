#!/usr/bin/env bash
# Checks this container from inside: tools/check_node.py for versions, imports, GPU, all-reduce, write rights and cache folders,
# then kernels of torch, Transformer Engine and flash attention. Takes check_node's options; exit code 0 when all is good.
#   containers/check.sh --output_dir /group/me/experiments --cache_dir /group/cache
#                                   caches lie where jobs have them with the site's cache_dir: without a home they need it
#   containers/check.sh --build     while an image is made: nothing of the machine that makes it counts
set -euo pipefail
project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export PYTHONNOUSERSITE=1

# Imports from a shared disk that is busy can take minutes.
kernels=1
options=(--software --timeout 300 --output_dir "${TMPDIR:-/tmp}")
caches='' words=()
while [ $# -gt 0 ]; do
    case $1 in
        --build)
            options+=(--quick --accelerator cpu)
            kernels=0
            # The image is read-only in Apptainer's %test, and nobody's caches are meant.
            caches=$(mktemp -d)
            trap 'rm -rf -- "$caches"' EXIT
            ;;
        --cache_dir | --cache-dir)
            [ -n "${2:-}" ] || { echo "error: $1 without a value" >&2; exit 2; }
            caches=$2/$(id -un)
            shift
            ;;
        *) words+=("$1") ;;
    esac
    shift
done
if [ -n "$caches" ]; then
    export HF_HOME=$caches/huggingface TRITON_CACHE_DIR=$caches/triton WANDB_CACHE_DIR=$caches/wandb XDG_CACHE_HOME=$caches/xdg
fi
# What the image was made with, where install_packages.py made it.
if [ -f "$project/image/kept.txt" ]; then
    options+=(--constraints "$project/image/constraints.txt" --kept "$project/image/kept.txt")
fi
"${PYTHON:-python3}" "$project/tools/check_node.py" "${options[@]}" ${words[@]+"${words[@]}"}
if [ "$kernels" = 1 ]; then
    "${PYTHON:-python3}" "$project/containers/check_kernels.py"
fi
