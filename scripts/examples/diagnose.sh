#!/usr/bin/env bash
# Note 5: why a training is slow. Measures it, ranks what costs time, and says what to change and what that gains.
#     EXPERIMENT=experiments/my_run scripts/examples/diagnose.sh
#     EXPERIMENT=experiments/my_run AGAINST=experiments/fast scripts/examples/diagnose.sh    # slower code, or more data?
#     SCRIPT='torchrun --nproc_per_node 8 train.py' scripts/examples/diagnose.sh             # any program that trains
#     EXPERIMENT=experiments/my_run SMALL=1 scripts/examples/diagnose.sh   # of a small run: less time, less precise
# Nothing is submitted: run it where the training runs: on Slurm `srun --gpus-per-node=8 ...`, on Grid Engine `qrsh -l node_f=1 -cwd ...`.
# Run again it measures again, to a report of its own: so a change is checked. Words behind it are flags of diagnose_speed.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

experiment=${EXPERIMENT:-experiments/llama31_pretraining}
script=${SCRIPT:-}                              # instead of an experiment
against=${AGAINST:-}                            # another experiment to compare with
reports=${REPORTS:-diagnosis}                   # folder for the reports
python=${PYTHON:-.venv/bin/python}

if [ -n "$script" ]; then
    source=(--script "$script") name=script
else
    source=("$experiment") name=$(basename "$experiment")
    "$python" tools/inspect_run.py "$experiment" --no-plot
fi
exec "$python" tools/diagnose_speed.py ${SMALL:+--without debug_variables,micro_batch --budget_s 20} "${source[@]}" ${against:+--against "$against"} \
    --output "$reports/$name/$(date +%Y%m%d-%H%M%S)" "$@"
