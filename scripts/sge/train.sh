#!/usr/bin/env bash
#$ -S /bin/bash
#$ -N train
#$ -cwd
#$ -l node_f=1
#$ -l h_rt=24:00:00
#$ -j y
# Trains on one node. Submitting it again continues from the newest checkpoint:
#     qsub -g GROUP scripts/sge/train.sh
# Several nodes, containers, chains of jobs: pretraining/pretrain.py --executor sge --num_nodes 4 --chain 3 ...
# writes such a script; --dry_run prints it.
set -euo pipefail

experiment=${EXPERIMENT:-llama31_pretraining}   # folder in experiments/
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder: architecture and tokenizer
weights=${WEIGHTS:-checkpoints/Llama-3.1-8B}    # initial weights
learning_rate=${LEARNING_RATE:-3e-5}            # a tenth of the rate from scratch: the weights are trained already
data=${DATA:-data/prepared}                     # folder of .bin/.idx
num_gpus=${NUM_GPUS:-4}
tensor_parallel=${TENSOR_PARALLEL:-4}
time_limit=${TIME_LIMIT:-24:00:00}              # the same as above: the run saves and ends 5 min before
python=${PYTHON:-.venv/bin/python}

exec "$python" pretraining/pretrain.py --executor local --experiment "$experiment" \
    --hf_model_id "$model" --nemo_model "$weights" --dataset_path "$data" \
    --num_gpus "$num_gpus" --tensor_model_parallel_size "$tensor_parallel" \
    --lr "$learning_rate" --time_limit "$time_limit" "$@"
