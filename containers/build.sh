#!/usr/bin/env bash
# Builds an image with this project and its packages. docs/containers.md says which kind for which cluster.
#
#   containers/build.sh apptainer --output /group/me/pretrainkit.sif --cache-dir /group/me/cache
#   containers/build.sh docker|podman [--output pretrainkit.tar] [--cache-dir DIR]
#
# Options:
#   --target gpu|cpu   on NGC's PyTorch (gpu, the default), or on plain Python for nodes without GPUs
#   --output PATH      Apptainer: the .sif file, or with --sandbox the folder (pretrainkit-TARGET.sif); the others: an archive
#                      for `load` beside the image in their store
#   --sandbox          Apptainer: a folder that can be changed, instead of a .sif
#   --tag NAME         docker, podman: the image's name (pretrainkit:TARGET)
#   --cache-dir DIR    folder on a group disk for downloads and podman's store (PRETRAINKIT_CACHE_DIR)
#   --tmp-dir DIR      folder for unpacking; a node's own disk is best (PRETRAINKIT_TMP_DIR; CACHE_DIR/tmp)
#   --base IMAGE       another base image than that of versions.env: a name in a registry, or for Apptainer a file or folder
#   --pip-conf FILE    pip's settings during the build, such as a mirror; it doesn't stay in the image
#   --overwrite        replace an output that exists
#   --dry-run          show the commands, do nothing
#   -- WORD...         further options for the builder itself
# Exit codes: 0 built and checked inside; 1 failed; 2 wrong request, before anything starts.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=containers/steps.sh
. "$here/steps.sh"

builder='' target=gpu output='' sandbox=0 tag='' base='' pip_conf='' overwrite=0 extra=()
cache_dir=${PRETRAINKIT_CACHE_DIR:-} tmp_dir=${PRETRAINKIT_TMP_DIR:-}
while [ $# -gt 0 ]; do
    case $1 in
        apptainer | docker | podman) builder=$1 ;;
        --target | --output | --tag | --cache-dir | --tmp-dir | --base | --pip-conf)
            [ $# -gt 1 ] || die 2 "$1 without a value"
            name=${1#--}
            printf -v "${name//-/_}" %s "$2"
            shift
            ;;
        --sandbox) sandbox=1 ;;
        --overwrite) overwrite=1 ;;
        --dry-run) dry_run=1 ;;
        --no-room-check) warn_no_room_check ;;
        --help | -h) usage "$0"; exit 0 ;;
        --) shift; extra=("$@"); break ;;
        *) die 2 "unknown: $1" "containers/build.sh --help" ;;
    esac
    shift
done

[ -n "$builder" ] || die 2 "no builder named" "apptainer, docker or podman; containers/build.sh --help"
case $target in gpu) kind=NGC ;; cpu) kind=CPU ;; *) die 2 "--target $target" "gpu or cpu" ;; esac
[ "$sandbox" = 0 ] || [ "$builder" = apptainer ] || die 2 "--sandbox with $builder" "Apptainer alone has them"
command -v "$builder" > /dev/null || die 2 "$builder isn't installed here" "load its module, or take another builder"
case $("$builder" build --help 2>&1) in *--build-arg*) ;; *) die 2 "this $builder has no --build-arg" "Apptainer 1.2 or newer" ;; esac
[ -z "$pip_conf" ] || [ -r "$pip_conf" ] || die 2 "--pip-conf: no file $pip_conf"
for folder in "$cache_dir" "$tmp_dir" "$output"; do
    case $folder in *[:,]*) die 2 "$folder" "take a path without commas and colons: builders read them as separators" ;; esac
done

base=${base:-$(setting ${kind}_IMAGE)}
bootstrap=docker
if [ "$builder" = apptainer ] && [ -e "$base" ]; then bootstrap=localimage base=$(realpath -- "$base"); fi
tag=${tag:-pretrainkit:$target}
if [ "$builder" = apptainer ]; then output=${output:-pretrainkit-$target$([ "$sandbox" = 1 ] || echo .sif)}; fi
if [ -n "$output" ]; then
    output=$(final_path "$output" "$overwrite")
    temporary=$(temporary_beside "$output") whole=$temporary
fi

# Where things really go if nothing is said: what the builder itself would take.
case $builder in
    apptainer) cached=${APPTAINER_CACHEDIR:-$HOME/.apptainer/cache} ;;
    docker) cached=$(docker info --format '{{ .DockerRootDir }}' 2> /dev/null) || die 2 "docker's daemon can't be reached" ;;
    *) cached=$(podman info --format '{{ .Store.GraphRoot }}') ;;
esac
if [ -n "$cache_dir" ]; then
    case $builder in apptainer) cached=$cache_dir/apptainer ;; podman) cached=$cache_dir/containers ;; esac
fi
[ -n "$cached" ] || die 2 "$builder doesn't say where it keeps images" "--cache-dir"
[ -n "$tmp_dir" ] || tmp_dir=${cache_dir:+$cache_dir/tmp}
case $builder in
    apptainer) tmp_dir=${tmp_dir:-${APPTAINER_TMPDIR:-${TMPDIR:-/tmp}}} ;;
    podman) tmp_dir=${tmp_dir:-${TMPDIR:-/var/tmp}} ;;
    *) tmp_dir=${tmp_dir:-${TMPDIR:-/tmp}} ;;
esac
cached=$(absolute "$cached") tmp_dir=$(absolute "$tmp_dir")
if [ "$dry_run" = 0 ]; then
    [ -z "$output" ] || remove_leftovers "$(prefix_beside "$output")"
    remove_leftovers "$tmp_dir/pretrainkit-build"
fi
echo "$target: about $(setting ${kind}_DOWNLOAD_GB) GB of downloads in $cached, $(setting ${kind}_UNPACKED_GB) GB unpacked in $tmp_dir" >&2

# The builder's own files, too: it leaves gigabytes behind when it is killed.
work=$(own_name "$tmp_dir/pretrainkit-build")
if [ "$dry_run" = 0 ]; then
    mkdir -p -- "$cached" "$tmp_dir" 2> /dev/null || [ "$builder" = docker ] || die 2 "can't write $cached or $tmp_dir"
    made+=("$work")
    copy_project "$work/project"
    copy_pip_conf "$pip_conf" "$work/mnt"
    mkdir -- "$work/tmp"
    cd -- "$work/project"
fi

case $builder in
    apptainer)
        export APPTAINER_CACHEDIR=$cached APPTAINER_TMPDIR=$work/tmp
        # Force: the image's help and labels, too, not those of a base that was made here. The output's name is new.
        options=(--force --build-arg "BOOTSTRAP=$bootstrap" --build-arg "BASE_IMAGE=$base")
        [ "$(id -u)" = 0 ] || options+=(--fakeroot)
        [ "$sandbox" = 0 ] || options+=(--sandbox)
        [ -z "$pip_conf" ] || options+=(--bind "$work/mnt:/mnt:ro")
        made+=("$temporary")
        # A folder: Apptainer unpacks a sandbox beside it, and leaves that behind when it is killed.
        [ "$dry_run" = 1 ] || mkdir -- "$temporary"
        whole=$temporary/image
        step apptainer build "${options[@]}" ${extra[@]+"${extra[@]}"} "$whole" containers/pretrainkit.def ||
            die 1 "apptainer build failed"
        ;;
    *)
        options=(--file containers/Dockerfile --target "$target" --tag "$tag")
        for name in NGC CPU; do
            image=$(setting "${name}_IMAGE")
            [ $name != $kind ] || image=$base
            options+=(--build-arg "${name}_IMAGE=$image")
        done
        [ -z "$pip_conf" ] || options+=(--secret "id=pip_conf,src=$work/mnt/pip.conf")
        store=()
        if [ "$builder" = docker ]; then
            export DOCKER_BUILDKIT=1
        else
            export TMPDIR=$work/tmp
            [ -z "$cache_dir" ] || store=(--root "$cached")
        fi
        step "$builder" ${store[@]+"${store[@]}"} build "${options[@]}" ${extra[@]+"${extra[@]}"} . ||
            die 1 "$builder build failed"
        if [ -n "$output" ]; then
            made+=("$temporary")
            step "$builder" ${store[@]+"${store[@]}"} save --output "$temporary" "$tag" || die 1 "$builder save failed"
        fi
        ;;
esac

if [ "$dry_run" = 0 ] && [ -n "$output" ]; then
    [ -s "$whole" ] || die 1 "$builder ended well, but wrote no image"
    commit "$whole" "$output" "$overwrite"
fi
echo "${output:-$tag}"
