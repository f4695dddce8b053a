#!/usr/bin/env bash
# Makes a .sqsh image for enroot and pyxis: imports an image, installs this project and its packages in it, checks it inside,
# and writes it again. Needs neither root nor docker.
#
#   containers/enroot.sh --output /group/me/pretrainkit.sqsh --cache-dir /group/me/cache
#
# Options:
#   --from IMAGE       what is imported: a name in a registry (NGC_IMAGE of versions.env), or dockerd://NAME and podman://NAME
#                      of an image that build.sh made
#   --import-only      as it is: for an image that has the project's packages
#   --output FILE      the .sqsh file (pretrainkit-gpu.sqsh)
#   --cache-dir DIR    folder on a group disk for downloads (PRETRAINKIT_CACHE_DIR)
#   --tmp-dir DIR      folder for unpacking; a node's own disk is best (PRETRAINKIT_TMP_DIR; CACHE_DIR/tmp)
#   --pip-conf FILE    pip's settings while packages are installed, such as a mirror; it doesn't stay in the image
#   --overwrite        replace an output that exists
#   --dry-run          show the commands, do nothing
# Accounts of registries stand in enroot's own .credentials file, never on a command line.
# Exit codes: 0 made and checked inside; 1 failed; 2 wrong request, before anything starts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/steps.sh
. "$here/steps.sh"

from='' import_only=0 output=pretrainkit-gpu.sqsh pip_conf='' overwrite=0
cache_dir=${PRETRAINKIT_CACHE_DIR:-} tmp_dir=${PRETRAINKIT_TMP_DIR:-}
while [ $# -gt 0 ]; do
    case $1 in
        --from | --output | --cache-dir | --tmp-dir | --pip-conf)
            [ $# -gt 1 ] || die 2 "$1 without a value"
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift
            ;;
        --import-only) import_only=1 ;;
        --overwrite) overwrite=1 ;;
        --dry-run) dry_run=1 ;;
        --no-room-check) warn_no_room_check ;;
        --help | -h) usage "$0"; exit 0 ;;
        *) die 2 "unknown: $1" "containers/enroot.sh --help" ;;
    esac
    shift
done

command -v enroot > /dev/null || die 2 "enroot isn't installed here" "run it on a node that has it, or take Apptainer: containers/build.sh"
[ -z "$pip_conf" ] || [ -r "$pip_conf" ] || die 2 "--pip-conf: no file $pip_conf"
for folder in "$cache_dir" "$tmp_dir" "$output"; do
    case $folder in *[:,]*) die 2 "$folder" "take a path without commas and colons: enroot reads them as separators" ;; esac
done
output=$(final_path "$output" "$overwrite")
temporary=$(temporary_beside "$output")
cached=${cache_dir:+$cache_dir/enroot}
cached=${cached:-${ENROOT_CACHE_PATH:-${XDG_CACHE_HOME:-$HOME/.cache}/enroot}}
tmp_dir=${tmp_dir:-${cache_dir:+$cache_dir/tmp}}
tmp_dir=${tmp_dir:-${ENROOT_TEMP_PATH:-${TMPDIR:-/tmp}}}
cached=$(absolute "$cached") tmp_dir=$(absolute "$tmp_dir")

# Without '#' some versions of enroot look for every name at Docker Hub.
from=${from:-$(setting NGC_IMAGE)}
case $from in
    *://*) ;;
    *'#'*) from=docker://$from ;;
    *.*/* | *:*/* | localhost/*) from=docker://${from%%/*}#${from#*/} ;;
    *) from=docker://$from ;;
esac

if [ "$dry_run" = 0 ]; then
    remove_leftovers "$(prefix_beside "$output")"
    remove_leftovers "$tmp_dir/pretrainkit-enroot"
fi
echo "about $(setting NGC_DOWNLOAD_GB) GB of downloads in $cached, twice $(setting NGC_UNPACKED_GB) GB unpacked in $tmp_dir" >&2

work=$(own_name "$tmp_dir/pretrainkit-enroot")
export ENROOT_CACHE_PATH=$cached ENROOT_TEMP_PATH=$work/tmp ENROOT_DATA_PATH=$work/data ENROOT_RUNTIME_PATH=$work/run
# Docker's layers are compressed again for each start of an image otherwise; this is quick to write and to read.
export ENROOT_SQUASH_OPTIONS=${ENROOT_SQUASH_OPTIONS:--comp zstd -Xcompression-level 3 -noD}
if [ "$dry_run" = 0 ]; then
    made+=("$work" "$temporary")
    mkdir -p -- "$cached" "$work/tmp" "$work/data" "$work/run" || die 2 "can't write $cached or $tmp_dir"
    copy_project "$work/mnt/pretrainkit"
    copy_pip_conf "$pip_conf" "$work/mnt"
fi

if [ "$import_only" = 1 ]; then
    step enroot import --output "$temporary" "$from" || die 1 "enroot import failed"
else
    step enroot import --output "$work/base.sqsh" "$from" || die 1 "enroot import failed"
    step enroot create --name pretrainkit "$work/base.sqsh" || die 1 "enroot create failed"
    step enroot start --root --rw --mount "$work/mnt:/mnt" pretrainkit bash -c \
        'rm -rf /opt/pretrainkit && cp -r /mnt/pretrainkit /opt/pretrainkit &&
        python3 /opt/pretrainkit/containers/install_packages.py &&
        /opt/pretrainkit/containers/check.sh --build' || die 1 "the packages could not be installed in the image"
    step enroot export --output "$temporary" pretrainkit || die 1 "enroot export failed"
fi
if [ "$dry_run" = 0 ]; then
    [ "$(head -c 4 -- "$temporary" 2> /dev/null)" = hsqs ] || die 1 "enroot ended well, but wrote no squashfs image"
    commit "$temporary" "$output" "$overwrite"
fi
echo "$output"
