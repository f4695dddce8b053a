#!/usr/bin/env bash
#PBS -S /bin/bash
#PBS -N preprocess
#PBS -q cpu
#PBS -l select=1:ncpus=16:mem=32gb
#PBS -l walltime=04:00:00
#PBS -j oe
#PBS -W umask=0022
#PBS -J 0-9
##PBS -P GROUP
# Text to .bin/.idx, one part of the input in each task of an array:
#     qsub scripts/pbs/preprocess.sh
# To rerun a failed task: qsub -J 3-4 (PBS has no arrays of one task; what is complete stays as it is)
# The same from a command line: tools/preprocess_data.py ... --shard array --executor pbs --array 0-9
umask 022 # PBS starts jobs with 077: a group could not read what they write
set -euo pipefail
cd "${PBS_O_WORKDIR:-.}"

input=${INPUT:-data/text}                       # .jsonl, .jsonl.gz, .zst, .parquet: files or a folder
output=${OUTPUT:-data/prepared/corpus}          # writes corpus_..._text_document.bin and .idx
tokenizer=${TOKENIZER:-models/Llama-3.1-8B}     # Hugging Face folder
num_tasks=${NUM_TASKS:-10}                      # tasks of the array above
python=${PYTHON:-.venv/bin/python}

exec "$python" tools/preprocess_data.py --input "$input" --output-prefix "$output" --shard "$PBS_ARRAY_INDEX/$num_tasks" \
    --tokenizer-model "$tokenizer" --special-tokens template --append-eod --workers "${NCPUS:-2}" "$@"
