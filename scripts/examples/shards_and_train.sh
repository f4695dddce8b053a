#!/usr/bin/env bash
# Note 1: a folder of text files becomes token shards, one in each task of a job array; then a training streams them.
#     MODEL=models/SmolLM2-135M INPUT=texts SMALL=1 scripts/examples/shards_and_train.sh     # here, on the CPU, minutes
#     EXECUTOR=slurm SITE=slurm ACCOUNT=mine scripts/examples/shards_and_train.sh --max_steps 1000
# It waits for the array. A task that failed and a training whose time is over are not submitted again by themselves: run
# this again, which makes the shards that are missing and continues the training. With --chain 3 or --requeue the
# training goes on by itself. Words behind it are flags of pretrain.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

executor=${EXECUTOR:-local}                     # local, slurm, pbs, sge
input=${INPUT:-data/text}                       # the n-th file, in natural order, becomes the n-th shard
shards=${SHARDS:-data/shards}
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder: architecture and tokenizer
weights=${WEIGHTS:-$model}                      # what the first start begins from
learning_rate=${LEARNING_RATE:-3e-5}            # a tenth of the rate from scratch: the weights are trained already
experiment=${EXPERIMENT:-llama31_shards}
cpus_per_task=${CPUS_PER_TASK:-8}               # of a task that makes a shard
stripes=${STRIPES:-8}                           # Lustre stripes of the shards' folder, where there is lfs
python=${PYTHON:-.venv/bin/python}

where=(--executor "$executor")
if [ "$executor" != local ]; then
    where+=(${SITE:+--site "$SITE"} ${ACCOUNT:+--account "$ACCOUNT"} ${PARTITION:+--partition "$PARTITION"}
        ${CONTAINER_IMAGE:+--container_image "$CONTAINER_IMAGE"})
fi

make=("$python" tools/make_shards.py --input_dir "$input" --output_dir "$shards" --model_id "$model" --append_eod)
if command -v lfs >/dev/null; then
    make+=(--stripe "$stripes")
fi
status=$("${make[@]}" --status) || [ $? -eq 1 ] || exit 2 # 1: some are missing
missing=$(sed -n 's/^missing: //p' <<<"$status")
if [ -n "$missing" ] && [ "$executor" = local ]; then
    "${make[@]}" --all
elif [ -n "$missing" ]; then
    # More files than Slurm's MaxArraySize: scripts/submit_shards.sh
    "${make[@]}" "${where[@]}" --cpus_per_task "$cpus_per_task" --workers "$cpus_per_task" --array "$missing" --follow
fi
"${make[@]}" --status # nothing is trained on an incomplete set

exec "$python" pretraining/pretrain.py ${SMALL:+--config scripts/examples/small.yaml} "${where[@]}" \
    --experiment "$experiment" --hf_model_id "$model" --nemo_model "$weights" --lr "$learning_rate" \
    --dataset_path "$shards" ${NUM_GPUS:+--num_gpus "$NUM_GPUS"} \
    ${SEQUENCE_LENGTH:+--sequence_length "$SEQUENCE_LENGTH"} "$@"
