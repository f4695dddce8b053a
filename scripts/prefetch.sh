#!/usr/bin/env bash
# Brings what a run needs to a group disk, for compute nodes without internet: models, tokenizers, a container. Run it where
# there is internet. A second run goes on with the files that are missing, and verifies what exists.
#
#   scripts/prefetch.sh --dir /group/me/offline --model meta-llama/Llama-3.1-8B --image /group/me/pretrainkit.sif
#   . /group/me/offline/offline.sh
#   python pretraining/pretrain.py --hf_model_id "$PREFETCHED/models/meta-llama/Llama-3.1-8B" ...
#
# Options:
#   --dir DIR          folder on a group disk: models in DIR/models/ID, tokenizers in DIR/tokenizers/ID, caches
#   --model ID         OWNER/NAME[@REVISION] of a model on the hub; may be repeated
#   --tokenizer ID     the same, but without weights
#   --image FILE       .sif (Apptainer) or .sqsh (enroot) to make with containers/, unless it exists
#   --token-file FILE  file with the hub's token, which only you can read; or export HF_TOKEN
# Prints the lines of DIR/offline.sh, which tell the libraries that there is no internet: eval "$(scripts/prefetch.sh ...)"
# Exit codes: 0 everything exists and is verified; 1 failed; 2 wrong request or too little disk space, before anything is downloaded.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=containers/steps.sh
. "$here/containers/steps.sh"

dir='' image='' token_file='' sources=()
while [ $# -gt 0 ]; do
    case $1 in
        --help | -h) usage "$0"; exit 0 ;;
        --token | --token=* | --hf-token* | --hf_token*)
            die 2 "a token on the command line is seen by everybody on this machine" "--token-file, or export HF_TOKEN" ;;
        --dir | --image | --token-file | --model | --tokenizer)
            [ $# -gt 1 ] || die 2 "$1 without a value"
            case $1 in
                --model | --tokenizer) sources+=("$1" "$2") ;;
                *) name=${1#--}; printf -v "${name//-/_}" %s "$2" ;;
            esac
            shift
            ;;
        *) die 2 "unknown: $1" "scripts/prefetch.sh --help" ;;
    esac
    shift
done
[ -n "$dir" ] || die 2 "no --dir" "a folder on a group disk"
[ ${#sources[@]} -gt 0 ] || [ -n "$image" ] || die 2 "nothing to fetch" "--model, --tokenizer or --image"
case $image in '' | *.sif | *.sqsh) ;; *) die 2 "--image $image" "a name that ends in .sif or .sqsh" ;; esac
mkdir -p -- "$dir" 2> /dev/null || die 2 "--dir: can't make $dir"
dir=$(cd -- "$dir" && pwd)
if [ -n "$token_file" ]; then
    [ -r "$token_file" ] || die 2 "--token-file: no file $token_file"
    case $(stat -c %a -- "$token_file") in *00) ;; *) die 2 "$token_file can be read by others" "chmod 600 $token_file" ;; esac
    HF_TOKEN=$(< "$token_file")
    export HF_TOKEN
fi

export HF_HOME=$dir/huggingface PYTHONNOUSERSITE=1
unset HF_HUB_OFFLINE TRANSFORMERS_OFFLINE HF_DATASETS_OFFLINE # this is the machine with internet
python=${PYTHON:-$here/.venv/bin/python}
fetch=("$python" "$here/tools/prefetch.py" --dir "$dir" ${sources[@]+"${sources[@]}"})

if [ ${#sources[@]} -gt 0 ]; then
    command -v "$python" > /dev/null || die 2 "no Python at $python" "make setup, or PYTHON=/path/to/python"
    step "${fetch[@]}" >&2
fi
if [ -n "$image" ] && [ -e "$image" ]; then
    case $(head -c 40 -- "$image" | tr -d '\0') in *SIF_MAGIC* | hsqs*) ;; *) die 1 "$image is no image" "remove it, and run this again" ;; esac
    echo "$image exists" >&2
elif [ -n "$image" ]; then
    make=("$here/containers/enroot.sh")
    [ "${image##*.}" = sqsh ] || make=("$here/containers/build.sh" apptainer)
    # The build has no use for the token.
    step env -u HF_TOKEN "${make[@]}" --output "$image" --cache-dir "${PRETRAINKIT_CACHE_DIR:-$dir/cache}" >&2
fi

temporary=$(temporary_beside "$dir/offline.sh")
made+=("$temporary")
{
    echo "# Libraries don't look for anything on the internet. Jobs that pretrain.py submits inherit these variables."
    echo "export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1 WANDB_MODE=offline"
    echo "export HF_HOME=$(quoted "$dir/huggingface") PREFETCHED=$(quoted "$dir")"
} > "$temporary"
mv -f -- "$temporary" "$dir/offline.sh"
cat -- "$dir/offline.sh"
