#!/usr/bin/env bash
#PBS -S /bin/bash
#PBS -N convert
#PBS -q cpu
#PBS -l select=1:ncpus=8:mem=32gb
#PBS -l walltime=02:00:00
#PBS -j oe
##PBS -P GROUP
# A Hugging Face model to a checkpoint that pretraining starts from:
#     qsub scripts/pbs/convert.sh
# The other way round, and Megatron-LM's formats at a given TP and PP: tools/convert_checkpoint.py --help
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

source=${SOURCE:-models/Llama-3.1-8B}           # Hugging Face folder
target=${TARGET:-checkpoints/Llama-3.1-8B}
python=${PYTHON:-.venv/bin/python}

exec "$python" tools/convert_checkpoint.py "$source" "$target" "$@"
