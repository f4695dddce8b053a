#!/usr/bin/env bash
# Note 4: continued pretraining on a Grid Engine cluster, from folders of .jsonl.gz to a model that may be given away.
#     export ACCOUNT=tga-NAME
#     scripts/examples/continual_pretraining.sh data       # a .bin/.idx pair for every file; waits for the job's end
#     scripts/examples/continual_pretraining.sh convert    # Hugging Face to Megatron; waits for the job's end
#     scripts/examples/continual_pretraining.sh train      # submits a job, and doesn't wait
#     scripts/examples/continual_pretraining.sh release    # submits a job: back to Hugging Face, and verified
# All four here, on the CPU, in minutes: export MODEL=models/SmolLM2-135M INPUT=corpus SMALL=1
# No job is submitted again by itself. When the time of the training's job is over type `train` again, which continues,
# or give it --chain 3 or --requeue. A step that failed is typed again; one that is done is not done again. Further words
# are flags of the step's command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

step=${1:-}
shift || true
site=${SITE:-tsubame4}                          # file of configs/site, or a path
input=${INPUT:-data/text}                       # searched through, with all folders in it
prepared=${PREPARED:-data/prepared} prepared=${prepared%/}
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder
format=${FORMAT:-nemo}                          # for Megatron-LM itself: torch_dist or torch
checkpoint=${CHECKPOINT:-checkpoints/Llama-3.1-8B}
experiment=${EXPERIMENT:-llm-cpt}
experiments_dir=${EXPERIMENTS_DIR:-experiments}
workers=${WORKERS:-16}                          # 64 on a node with as many cores
export PYTHON=${PYTHON:-.venv/bin/python}
where=(--site "$site" ${ACCOUNT:+--account "$ACCOUNT"} ${CONTAINER_IMAGE:+--container_image "$CONTAINER_IMAGE"})
job=("${where[@]}" --follow)
[ -z "${SMALL:-}" ] || where=() job=() # nothing is submitted

# need VARIABLE PATH: what is missing is told here, before a job waits in vain.
need() {
    [ -n "$(find -L "$2" -type f -print -quit 2>/dev/null)" ] && return
    echo "continual_pretraining.sh: no $2, or no file in it: set $1" >&2
    exit 2
}

case $step in
data)
    need INPUT "$input"
    need MODEL "$model/config.json"
    if [ ! -e "$prepared.partial" ] && [ -n "$(find "$prepared" -name '*.manifest.json' -print -quit 2>/dev/null)" ]; then
        echo "continual_pretraining.sh: $prepared is complete; for other text set PREPARED" >&2
        exit 0
    fi
    exec "$PYTHON" tools/preprocess_data.py --input "$input" --output-prefix "$prepared/" --per-file \
        --tokenizer-model "$model" --special-tokens template --append-eod --workers "$workers" "${job[@]}" "$@"
    ;;
convert)
    need MODEL "$model/config.json"
    if [ -e "$checkpoint" ]; then
        echo "continual_pretraining.sh: $checkpoint is there; for another model set CHECKPOINT" >&2
        exit 0
    fi
    cut=() # a NeMo checkpoint has none: the training cuts it
    [ "$format" = nemo ] || cut=(--target-tensor-parallel-size "${TENSOR_PARALLEL:-1}"
        --target-pipeline-parallel-size "${PIPELINE_PARALLEL:-2}")
    exec "$PYTHON" tools/convert_checkpoint.py "$model" "$checkpoint" --target-format "$format" "${cut[@]}" \
        "${job[@]}" "$@"
    ;;
train)
    exec "$PYTHON" pretraining/pretrain.py --config configs/model/llama-3.1-8b.yaml \
        --config configs/run/llama-3.1-8b-swallow.yaml ${SMALL:+--config scripts/examples/small.yaml} "${where[@]}" \
        --experiments_dir "$experiments_dir" --experiment "$experiment" --hf_model_id "$model" \
        --nemo_model "$checkpoint" --dataset_path "$prepared" \
        ${TENSOR_PARALLEL:+--tensor_model_parallel_size "$TENSOR_PARALLEL"} \
        ${PIPELINE_PARALLEL:+--pipeline_model_parallel_size "$PIPELINE_PARALLEL"} "$@"
    ;;
release)
    checkpoints=("$experiments_dir/$experiment"/checkpoints/step_*/complete.json)
    newest=${checkpoints[-1]}
    if [ ! -e "$newest" ]; then
        echo "continual_pretraining.sh: no complete checkpoint in $experiments_dir/$experiment: train first" >&2
        exit 2
    fi
    export CHECKPOINT=${newest%/complete.json}
    export RELEASED=${RELEASED:-released/$experiment/${CHECKPOINT##*/}}
    mkdir -p "$(dirname "$RELEASED")"
    echo "$CHECKPOINT to $RELEASED; log $RELEASED.log; publish it when $RELEASED.verified.md says that it passed"
    submit=(qsub ${ACCOUNT:+-g "$ACCOUNT"} -o "$RELEASED.log" -v "CHECKPOINT,RELEASED,PYTHON")
    [ -z "${SMALL:-}" ] || submit=()
    exec "${submit[@]}" scripts/sge/release.sh --base "$model" "$@"
    ;;
*)
    echo "usage: continual_pretraining.sh data|convert|train|release [flags of the step's command]" >&2
    exit 2
    ;;
esac
