#!/usr/bin/env bash
#PBS -S /bin/bash
#PBS -N release
#PBS -q cpu
#PBS -l select=1:ncpus=16:mem=128gb
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -W umask=0022
##PBS -P GROUP
# A trained checkpoint to a Hugging Face folder, then the release gate:
#     qsub scripts/pbs/release.sh
# Publish the folder only when this ends with 0: released.verified.md then says what was compared.
umask 022 # PBS starts jobs with 077: a group could not read what they write
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

checkpoint=${CHECKPOINT:-experiments/llama31_pretraining/checkpoints/step_00001000}
released=${RELEASED:-released}                  # folder to write
python=${PYTHON:-.venv/bin/python}

[ -d "$released" ] || "$python" tools/convert_checkpoint.py "$checkpoint" "$released"
exec "$python" tools/verify_release.py "$checkpoint" "$released" "$@"
