#!/usr/bin/env bash
#$ -S /bin/bash
#$ -N preprocess
#$ -cwd
#$ -l cpu_16=1
#$ -l h_rt=04:00:00
#$ -j y
#$ -t 1-10
# Text to .bin/.idx, one part of the input in each task of an array:
#     qsub -g GROUP scripts/sge/preprocess.sh
# To rerun a failed task: qsub -t 4 (Grid Engine counts from 1)
# The same from a command line: tools/preprocess_data.py ... --shard array --executor sge --array 0-9
set -euo pipefail

input=${INPUT:-data/text}                       # .jsonl, .jsonl.gz, .zst, .parquet: files or a folder
output=${OUTPUT:-data/prepared/corpus}          # writes corpus_..._text_document.bin and .idx
tokenizer=${TOKENIZER:-models/Llama-3.1-8B}     # Hugging Face folder
num_tasks=${NUM_TASKS:-10}                      # tasks of the array above
python=${PYTHON:-.venv/bin/python}

exec "$python" tools/preprocess_data.py --input "$input" --output-prefix "$output" --shard "$((SGE_TASK_ID - 1))/$num_tasks" \
    --tokenizer-model "$tokenizer" --special-tokens template --append-eod --workers "${WORKERS:-16}" "$@"
