#!/usr/bin/env bash
#$ -S /bin/bash
#$ -N convert
#$ -cwd
#$ -l cpu_8=1
#$ -l h_rt=02:00:00
#$ -j y
# A Hugging Face model to a checkpoint that pretraining starts from:
#     qsub -g GROUP scripts/sge/convert.sh
# The other way round, and Megatron-LM's formats at a given TP and PP: tools/convert_checkpoint.py --help
set -euo pipefail

source=${SOURCE:-models/Llama-3.1-8B}           # Hugging Face folder
target=${TARGET:-checkpoints/Llama-3.1-8B}
python=${PYTHON:-.venv/bin/python}

exec "$python" tools/convert_checkpoint.py "$source" "$target" "$@"
