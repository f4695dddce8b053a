#!/usr/bin/env bash
# From one run at a stable learning rate to a published model: three branches decay from different steps of it, are
# averaged, compared, released and published.
#     scripts/examples/decay_branches.sh stable     # trains at a stable rate; --max_steps may grow at any time
#     scripts/examples/decay_branches.sh decay      # a branch from each of the last three checkpoints
#     scripts/examples/decay_branches.sh compare    # a page with the stable run and its branches; their scores with TASKS
#     scripts/examples/decay_branches.sh release    # the branches' average, in Hugging Face's format, and verified
#     scripts/examples/decay_branches.sh publish    # to REPO on the hub, private; --dry_run shows every file and the card
# All here, on the CPU, in minutes: export MODEL=models/SmolLM2-135M DATA=data/prepared SMALL=1
# A step that is typed again goes on, or says that it is done. Further words are flags of the step's command.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

step=${1:-}
shift || true
model=${MODEL:-models/Llama-3.1-8B}             # Hugging Face folder
data=${DATA:-data/prepared}                     # of preprocess_data.py
experiments_dir=${EXPERIMENTS_DIR:-experiments}
stable=${STABLE:-stable}                        # experiment
cooldown=${COOLDOWN:-2000}                      # steps of a decay
released=${RELEASED:-released/$stable}
repo=${REPO:-}                                  # OWNER/NAME
tasks=${TASKS:-}                                # of lm-evaluation-harness, or YAML files; blanks between them
python=${PYTHON:-.venv/bin/python}
small=()
[ -z "${SMALL:-}" ] || small=(--config scripts/examples/small.yaml) cooldown=${COOLDOWN:-2}
branches=("$experiments_dir/${stable}"_decay_1 "$experiments_dir/${stable}"_decay_2 "$experiments_dir/${stable}"_decay_3)

fail() {
    echo "decay_branches.sh: $*" >&2
    exit 2
}

# train EXPERIMENT FLAG ...: the stable run and its branches differ in their flags alone.
train() {
    local experiment=$1
    shift
    "$python" pretraining/pretrain.py --config configs/model/llama-3.1-8b.yaml \
        --config configs/run/llama-3.1-8b-swallow.yaml "${small[@]}" --experiments_dir "$experiments_dir" \
        --experiment "$experiment" --hf_model_id "$model" --dataset_path "$data" --keep_last 3 "$@"
}

# newest EXPERIMENT: its newest complete checkpoint.
newest() {
    local checkpoints=("$1"/checkpoints/step_*/complete.json)
    [ -e "${checkpoints[-1]}" ] || fail "no complete checkpoint in $1"
    echo "${checkpoints[-1]%/complete.json}"
}

case $step in
stable)
    train "$stable" --nemo_model "$model" --lr_schedule constant ${SMALL:+--max_steps 6} "$@"
    ;;
decay)
    checkpoints=("$experiments_dir/$stable"/checkpoints/step_*/complete.json)
    [ "${#checkpoints[@]}" -ge 3 ] || fail "fewer than three checkpoints in $experiments_dir/$stable: train it first"
    for number in 1 2 3; do
        path=${checkpoints[-$number]%/complete.json}
        first=$((10#${path##*step_}))
        train "${stable}_decay_$number" --branch_from "$stable:$first" --lr_schedule wsd --lr_cooldown "$cooldown" \
            --max_steps $((first + cooldown)) "$@"
    done
    ;;
compare)
    if [ -n "$tasks" ]; then
        for branch in "${branches[@]}"; do
            # shellcheck disable=SC2086 # blanks divide tasks
            "$python" tools/evaluate.py "$(newest "$branch")" --tasks $tasks "$@"
        done
    fi
    exec "$python" tools/inspect_run.py "$experiments_dir/$stable" "${branches[@]}" --html "$experiments_dir/$stable.html"
    ;;
release)
    checkpoints=()
    for branch in "${branches[@]}"; do checkpoints+=("$(newest "$branch")"); done
    mkdir -p "$(dirname "$released")"
    "$python" tools/merge_checkpoints.py "${checkpoints[@]}" "$released" --target-format hf
    exec "$python" tools/verify_release.py "${checkpoints[@]}" "$released" --base "$model" "$@"
    ;;
publish)
    [ -n "$repo" ] || fail "set REPO to OWNER/NAME"
    exec "$python" tools/publish_release.py "$released" "$repo" "$@"
    ;;
*)
    echo "usage: decay_branches.sh stable|decay|compare|release|publish [flags of the step's command]" >&2
    exit 2
    ;;
esac
