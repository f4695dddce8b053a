#!/usr/bin/env bash
#PBS -S /bin/bash
#PBS -N convert
#PBS -q cpu
#PBS -l select=1:ncpus=8:mem=32gb
#PBS -l walltime=02:00:00
#PBS -j oe
#PBS -W umask=0022
##PBS -P GROUP
# A Hugging Face model to a checkpoint that pretraining starts from:
#     qsub scripts/pbs/convert.sh
# The other way round, and Megatron-LM's formats at a given TP and PP: tools/convert_checkpoint.py --help
umask 022 # PBS starts jobs with 077: a group could not read what they write
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

source=${SOURCE:-models/Llama-3.1-8B}           # Hugging Face folder
target=${TARGET:-checkpoints/Llama-3.1-8B}
python=${PYTHON:-.venv/bin/python}

exec "$python" tools/convert_checkpoint.py "$source" "$target" "$@"
