# shellcheck shell=bash
# Shared by build.sh and enroot.sh: errors, steps that --dry-run only shows, and outputs that appear whole or not at all.
# Sourced; reads dry_run (0 or 1).

dry_run=0
child=
made=()

# die CODE FOUND [WHAT TO DO]: 2 for a wrong request, 1 for work that failed.
die() {
    echo "error: $2" >&2
    [ -z "${3:-}" ] || echo "  What to do: $3" >&2
    exit "$1"
}

# --no-room-check: accepted for one version more.
warn_no_room_check() { echo "warning: --no-room-check has no effect: the builder itself reports a full disk" >&2; }

# usage SCRIPT: the comment at its top.
usage() { sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//;p}' "$1"; }

# final_path OUTPUT OVERWRITE: its absolute path, once its folder is there and nobody's work would be lost.
final_path() {
    local path
    mkdir -p -- "$(dirname -- "$1")" 2> /dev/null || die 2 "--output: can't make $(dirname -- "$1")"
    path=$(cd -- "$(dirname -- "$1")" && pwd)/$(basename -- "$1")
    [ ! -e "$path" ] || [ "$2" = 1 ] || die 2 "$path exists" "--overwrite, or another --output"
    echo "$path"
}

# quoted WORD...: the words as bash takes them, on one line.
quoted() {
    local text
    printf -v text ' %q' "$@"
    printf '%s\n' "${text:1}"
}

# step COMMAND...: shown, and carried out unless --dry-run. A signal to this script ends the command, too.
step() {
    echo "+ $(quoted "$@")" >&2
    [ "$dry_run" = 0 ] || return 0
    "$@" < /dev/null &
    child=$!
    wait "$child"
}

# absolute PATH: as seen from here; it need not exist. Builders are started in another folder.
absolute() { realpath -ms -- "$1"; }

# own_name PREFIX: a name for what isn't whole yet; it says which process of which host makes it.
own_name() { echo "$1-$(hostname)-$$"; }

# prefix_beside FINAL, temporary_beside FINAL: such names in FINAL's folder, all and this process's.
prefix_beside() { echo "$(dirname "$1")/.$(basename "$1").partial"; }
temporary_beside() { own_name "$(prefix_beside "$1")"; }

# remove_leftovers PREFIX: what killed builds of this host left under such names. A host login-2 isn't login.
remove_leftovers() {
    local left process
    for left in "$1-$(hostname)-"*; do
        process=${left#"$1-$(hostname)-"}
        process=${process%.old}
        case $process in *[!0-9]*) continue ;; esac
        if [ -e "$left" ] && ! kill -0 "$process" 2> /dev/null; then
            remove "$left"
        fi
    done
}

# remove PATH...: also folders of an image that its own permissions protect. What belongs to its other users, who have numbers
# of this user's range (/etc/subuid), Apptainer alone can delete: it puts a new image, an empty one, in the folder's place.
remove() {
    local path work
    chmod -R u+rwX -- "$@" 2> /dev/null || true
    rm -rf -- "$@" 2> /dev/null && return
    for path; do
        if [ ! -d "$path" ] || ! command -v apptainer > /dev/null; then continue; fi
        work=$(mktemp -d -- "$path.XXXXXX") || continue
        echo "Bootstrap: scratch" > "$work/empty.def"
        APPTAINER_TMPDIR=$work apptainer build --fakeroot --sandbox --force "$path" "$work/empty.def" > /dev/null 2>&1 || true
        rm -rf -- "$work"
    done
    # Its own words say what stays; the image is none the worse for it.
    rm -rf -- "$@" || true
}

# commit TEMPORARY FINAL OVERWRITE: gives what is whole its name.
commit() {
    sync -f "$1" 2> /dev/null || sync
    if [ "$3" = 1 ] && [ -e "$2" ]; then
        local old
        old=$(temporary_beside "$2").old
        mv -T -- "$2" "$old"
        mv -T -- "$1" "$2"
        remove "$old"
        return
    fi
    mv -nT -- "$1" "$2"
    [ ! -e "$1" ] || die 1 "$2 was made by somebody else meanwhile; theirs stays"
}

# clean: what an ended script leaves nowhere. Set as the trap of EXIT.
clean() {
    local code=$?
    trap - EXIT INT TERM
    if [ -n "$child" ] && kill -0 "$child" 2> /dev/null; then
        kill -TERM "$child" 2> /dev/null || true
        wait "$child" 2> /dev/null || true
    fi
    [ ${#made[@]} = 0 ] || remove "${made[@]}"
    exit "$code"
}
trap clean EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

# setting NAME: the value of NAME in versions.env.
setting() {
    sed -n "s/^$1=//p" "$(dirname "${BASH_SOURCE[0]}")/versions.env"
}

# copy_pip_conf FILE FOLDER: pip's settings where install_packages.py looks for them when FOLDER is /mnt in the image.
copy_pip_conf() {
    mkdir -p -- "$2"
    [ -z "$1" ] || install -m 600 -- "$1" "$2/pip.conf"
}

# copy_project FOLDER: what of this checkout belongs into an image; nothing hidden (.git, .venv, .env).
copy_project() {
    local project
    project=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
    mkdir -p -- "$1"
    tar -C "$project" -c --exclude='.*' --exclude=__pycache__ --exclude='*.egg-info' \
        pyproject.toml constraints.txt README.md configs containers pretraining scripts src tools | tar -C "$1" -x
}
