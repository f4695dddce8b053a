#!/usr/bin/env bash
# Note 2: prepares a dataset once and trains on it, on this machine. What was stopped is continued by pretrain_cont.sh.
#     MODEL=models/SmolLM2-135M INPUT=my.jsonl SMALL=1 scripts/examples/pretrain.sh          # on the CPU, minutes
#     INPUT=data/text DATASET_NUM_PROC=32 scripts/examples/pretrain.sh --global_batch_size 512
# Nothing is submitted and nothing starts again by itself: a training that stopped waits for pretrain_cont.sh.
# How many processes prepare the data, and how large their batches are, follows from the machine; these variables go
# first: DATASET_NUM_PROC, DATASET_BATCH_SIZE, DATASET_WRITER_BATCH_SIZE. Words behind it are flags of pretrain.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

experiment=${EXPERIMENT:-my_pretraining}
experiments_dir=${EXPERIMENTS_DIR:-experiments}
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder: architecture and tokenizer
weights=${WEIGHTS:-$model}                      # what the first start begins from
learning_rate=${LEARNING_RATE:-3e-5}            # a tenth of the rate from scratch: the weights are trained already
input=${INPUT:-data/text}                       # files, folders, a saved dataset, or hub:NAME
packed=${PACKED:-data/packed/$experiment}       # written once, then only read
sequence_length=${SEQUENCE_LENGTH:-${SMALL:+128}}
sequence_length=${sequence_length:-8192}
python=${PYTHON:-.venv/bin/python}

has_begun=no
[ -z "$(find "$experiments_dir/$experiment/checkpoints" -mindepth 1 -maxdepth 1 2>/dev/null)" ] || has_begun=yes
if [ "${PRETRAIN_CONTINUES:-no}" != "$has_begun" ]; then
    case $has_begun in
    yes) echo "pretrain.sh: $experiments_dir/$experiment has checkpoints: scripts/examples/pretrain_cont.sh continues it" >&2 ;;
    no) echo "pretrain_cont.sh: $experiments_dir/$experiment has no checkpoint: scripts/examples/pretrain.sh begins it" >&2 ;;
    esac
    exit 2
fi

"$python" tools/pack_dataset.py --input "$input" --output_dir "$packed" --tokenizer_model "$model" \
    --special_tokens template --sequence_length "$sequence_length"
exec "$python" pretraining/pretrain.py ${SMALL:+--config scripts/examples/small.yaml} --executor local \
    --experiments_dir "$experiments_dir" --experiment "$experiment" --hf_model_id "$model" --nemo_model "$weights" \
    --lr "$learning_rate" --dataset_path "$packed" --sequence_length "$sequence_length" \
    ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} "$@"
