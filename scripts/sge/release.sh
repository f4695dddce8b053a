#!/usr/bin/env bash
#$ -S /bin/bash
#$ -N release
#$ -cwd
#$ -l cpu_16=1
#$ -l h_rt=04:00:00
#$ -j y
# A trained checkpoint to a Hugging Face folder, then the release gate:
#     qsub -g GROUP scripts/sge/release.sh
# Publish the folder only when this ends with 0: released.verified.md then says what was compared.
set -euo pipefail

checkpoint=${CHECKPOINT:-experiments/llama31_pretraining/checkpoints/step_00001000}
released=${RELEASED:-released}                  # folder to write
python=${PYTHON:-.venv/bin/python}

[ -d "$released" ] || "$python" tools/convert_checkpoint.py "$checkpoint" "$released"
exec "$python" tools/verify_release.py "$checkpoint" "$released" "$@"
