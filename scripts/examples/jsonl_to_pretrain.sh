#!/usr/bin/env bash
# Note 3: a JSON Lines file with a `text` field becomes a .bin/.idx pair, and Llama 3.1 8B is trained on it.
#     MODEL=models/SmolLM2-135M INPUT=my.jsonl SMALL=1 scripts/examples/jsonl_to_pretrain.sh # on the CPU, minutes
#     scripts/examples/jsonl_to_pretrain.sh                            # on this machine, one epoch
#     CONFIG=qwen3-30b-a3b MODEL=models/Qwen3-30B-A3B-Base EXPERIMENT=qwen3-30b-a3b scripts/examples/jsonl_to_pretrain.sh
#     EXECUTOR=slurm ACCOUNT=root PARTITION=defq CONTAINER_IMAGE=nemo.sqsh scripts/examples/jsonl_to_pretrain.sh -N 2
# It waits for the job that tokenizes, and submits the training. A job whose time is over is not submitted again by itself:
# run this again, which continues what was stopped, or give --chain 3 or --requeue. Words behind it are flags of pretrain.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

executor=${EXECUTOR:-local}                     # local, slurm, pbs, sge
input=${INPUT:-data/custom_dataset/wikinews.jsonl}
prepared=${PREPARED:-data/custom_dataset/preprocessed}
file=$(basename "$input")
name=${NAME:-${file%%.*}}                       # writes NAME_text_document.bin and .idx
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder: architecture and tokenizer
weights=${WEIGHTS-$model}                       # Hugging Face folder or NeMo checkpoint to start from
experiment=${EXPERIMENT:-llama31_pretraining}
workers=${WORKERS:-8}
python=${PYTHON:-.venv/bin/python}
# Global batch 2048, micro batch 1, TP 4, sequences of 8192, 8 GPUs, a learning rate for trained weights. For random ones:
#     WEIGHTS='' scripts/examples/jsonl_to_pretrain.sh --set nemo_model=null --lr 3e-4
config=${CONFIG:-llama-3.1-8b}                  # a file of configs/model and of configs/run
configs=(--config "configs/model/$config.yaml" --config "configs/run/$config.yaml"
    ${SMALL:+--config scripts/examples/small.yaml})

where=(--executor "$executor") follow=()
if [ "$executor" != local ]; then
    follow=(--cpus_per_task "$workers" --follow)
    where+=(${SITE:+--site "$SITE"} ${ACCOUNT:+--account "$ACCOUNT"} ${PARTITION:+--partition "$PARTITION"}
        ${CONTAINER_IMAGE:+--container_image "$CONTAINER_IMAGE"})
fi

prefix=$prepared/$name
if [ -f "${prefix}_text_document.manifest.json" ] && [ ! -e "$prefix.partial" ]; then
    echo "jsonl_to_pretrain.sh: ${prefix}_text_document is there; for another text set NAME or PREPARED" >&2
else
    "$python" tools/preprocess_data.py --input "$input" --output-prefix "$prefix" --tokenizer-model "$model" \
        --special-tokens template --append-eod --workers "$workers" "${where[@]}" "${follow[@]}"
fi
exec "$python" pretraining/pretrain.py "${configs[@]}" "${where[@]}" --experiment "$experiment" --hf_model_id "$model" \
    ${weights:+--nemo_model "$weights"} --dataset_path "${prefix}_text_document" "$@"
