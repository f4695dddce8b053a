#!/usr/bin/env bash
# Note 4: continued pretraining on a Grid Engine cluster, from folders of .jsonl.gz to a model that may be given away.
#     export ACCOUNT=tga-NAME
#     scripts/examples/continual_pretraining.sh data       # a .bin/.idx pair for every file; waits for the job's end
#     scripts/examples/continual_pretraining.sh convert    # Hugging Face to Megatron; waits for the job's end
#     scripts/examples/continual_pretraining.sh train      # submits, and once more when the job's time was over
#     scripts/examples/continual_pretraining.sh release    # submits: back to Hugging Face, and verified
# A step that is done is not done again, but for train, which goes on. Further words are flags of the step's command.
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
tensor=${TENSOR_PARALLEL:-1} pipeline=${PIPELINE_PARALLEL:-2}
export PYTHON=${PYTHON:-.venv/bin/python}
where=(--site "$site" ${ACCOUNT:+--account "$ACCOUNT"} ${CONTAINER_IMAGE:+--container_image "$CONTAINER_IMAGE"})

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
        --tokenizer-model "$model" --append-eod --workers "$workers" "${where[@]}" --follow "$@"
    ;;
convert)
    need MODEL "$model/config.json"
    if [ -e "$checkpoint" ]; then
        echo "continual_pretraining.sh: $checkpoint is there; for another model set CHECKPOINT" >&2
        exit 0
    fi
    cut=() # a NeMo checkpoint has none: the training cuts it
    [ "$format" = nemo ] || cut=(--target-tensor-parallel-size "$tensor" --target-pipeline-parallel-size "$pipeline")
    exec "$PYTHON" tools/convert_checkpoint.py "$model" "$checkpoint" --target-format "$format" "${cut[@]}" \
        "${where[@]}" --follow "$@"
    ;;
train)
    exec "$PYTHON" pretraining/pretrain.py --config configs/model/llama-3.1-8b.yaml \
        --config configs/run/llama-3.1-8b-swallow.yaml "${where[@]}" --experiments_dir "$experiments_dir" \
        --experiment "$experiment" --hf_model_id "$model" --nemo_model "$checkpoint" --dataset_path "$prepared" \
        --tensor_model_parallel_size "$tensor" --pipeline_model_parallel_size "$pipeline" "$@"
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
    exec qsub ${ACCOUNT:+-g "$ACCOUNT"} -o "$RELEASED.log" -v CHECKPOINT,RELEASED,PYTHON scripts/sge/release.sh \
        --base "$model" "$@"
    ;;
*)
    echo "usage: continual_pretraining.sh data|convert|train|release [flags of the step's command]" >&2
    exit 2
    ;;
esac
