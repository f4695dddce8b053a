#!/usr/bin/env bash
# Submits make_shards.py for a set with more shards than a Slurm array may have tasks: several arrays, each with its offset.
#   scripts/submit_shards.sh NUM_SHARDS --input_dir ... --output_dir ... --model_id ... [--partition ... --time_limit ...]
# Exits with 1 at the first array that is refused, and says which shards were submitted before it.
set -euo pipefail

count=${1:?number of shards, then the flags of make_shards.py}
shift
[[ $count =~ ^[1-9][0-9]*$ ]] || { echo "error: $count is no number of shards" >&2; exit 2; }
limit=$(scontrol show config | sed -n 's/^MaxArraySize *= *//p')
[[ $limit =~ ^[1-9][0-9]*$ ]] || limit=1001 # Slurm's own; indexes must be below it
tool="$(dirname "${BASH_SOURCE[0]}")/../tools/make_shards.py"

for ((first = 0; first < count; first += limit)); do
  size=$((count - first < limit ? count - first : limit))
  "${PYTHON:-python}" "$tool" "$@" --executor slurm --array "0-$((size - 1))" --shard_offset "$first" || {
    echo "error: shards $first to $((first + size - 1)) were not submitted;" \
      "$first shards before them were. When you submit again, tasks whose shard is there do nothing." >&2
    exit 1
  }
done
