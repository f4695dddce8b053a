#!/usr/bin/env bash
# The whole path on a CPU: text -> .bin/.idx -> Megatron checkpoint -> training, stopped and resumed -> Hugging Face.
# Each step is a command of this project, printed before it runs. Kill it at any point and run it again.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PWD/.venv/bin:$PATH"
out=${DEMO_DIR:-build/demo}
started=$SECONDS

step() { printf '\n== %s\n' "$1"; }
run() { printf '$ %s\n' "$*"; "$@"; }

step "1. A model and a text, both from Python packages"
run python scripts/demo/make_inputs.py --output "$out"

step "2. Text to token ids in Megatron's format"
if [ ! -f "$out/data/reference_text_document.manifest.json" ]; then
    run python tools/preprocess_data.py --input "$out/reference.jsonl" --output-prefix "$out/data/reference" \
        --tokenizer-model "$out/smollm2-135m" --append-eod --workers 2
fi

step "3. The Hugging Face model to a Megatron checkpoint"
if [ ! -d "$out/smollm2-135m-nemo" ]; then
    run python tools/convert_checkpoint.py "$out/smollm2-135m" "$out/smollm2-135m-nemo"
fi

train() {
    run python pretraining/pretrain.py --executor local --accelerator cpu --num_gpus 2 "$@" \
        --experiments_dir "$out/experiments" --experiment smollm2-cpu \
        --hf_model_id "$out/smollm2-135m" --nemo_model "$out/smollm2-135m-nemo" --dataset_path "$out/data" \
        --pipeline_model_parallel_size 2 --sequence_length 128 --global_batch_size 4 --split 90,10,0 \
        --lr 1e-4 --lr_warmup_steps 2 --lr_decay_steps 24 --save_interval 12 --val_interval 6 --val_steps 4
}

step "4. Train on two processes, pipeline parallel, and stop"
train --max_steps 12

step "5. The same command goes on where it stopped"
train --max_steps 24

step "6. The trained checkpoint back to Hugging Face"
if [ ! -d "$out/released" ]; then
    run python tools/convert_checkpoint.py "$out/experiments/smollm2-cpu/checkpoints/step_00000024" "$out/released"
fi

step "7. Before and after"
run python scripts/demo/report.py --before "$out/smollm2-135m" --after "$out/released" \
    --text "$out/reference.jsonl" --experiment "$out/experiments/smollm2-cpu"
printf '\nDone in %d s.\n' $((SECONDS - started))
