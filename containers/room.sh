# shellcheck shell=bash
# How much may still be written where: the least of what df, quota and Lustre's quotas say. Sourced after steps.sh.

home_is_refused="choose a folder on a group disk: --cache-dir, --tmp-dir, --output"
declare -A room_needed=() room_folder=() room_places=()

# existing FOLDER: the folder, or the nearest one above that exists and may be entered.
existing() {
    local folder=$1
    until (cd -- "$folder" 2> /dev/null && pwd -P); do folder=$(dirname -- "$folder"); done
}

# disk_of FOLDER: the device or export it lies on.
disk_of() { df -P -- "$1" | awk 'NR == 2 { print $1 }'; }

# room_in FOLDER: bytes that this user may still write there, and who says so.
room_in() {
    local folder=$1 disk
    disk=$(disk_of "$folder")
    {
        df -Pk -- "$folder" | awk 'NR == 2 { printf "%.0f df\n", $4 * 1024 }'
        # -p: a number for each column, also where no grace period runs. Its exit code tells of other disks, too.
        if command -v quota > /dev/null; then
            { quota -w -p -u -g 2> /dev/null || true; } | awk -v disk="$disk" "$(left_of_quota)"'
                $1 == disk { left($2, $3, $4, "quota") }'
        fi
        if command -v lfs > /dev/null; then
            lustre_quotas "$folder" | awk "$(left_of_quota)"'{ left($2, $3, $4, "lfs quota") }'
        fi
    } | sort -n | head -n 1
}

# Bytes left of a quota in KiB: below the soft limit where there is one, since above it a time runs. 0 is no limit.
left_of_quota() {
    cat << 'AWK'
function left(used, soft, hard, who,    limit) {
    gsub(/[^0-9]/, "", used)
    if (soft !~ /^[0-9]+$/ || hard !~ /^[0-9]+$/) return
    limit = soft + 0 && (!(hard + 0) || soft + 0 < hard + 0) ? soft + 0 : hard + 0
    if (limit) printf "%.0f %s\n", (limit > used + 0 ? (limit - used) * 1024 : 0), who
}
AWK
}

# lustre_quotas FOLDER: lines of lfs quota of the user, the folder's group and its project, each on one line.
lustre_quotas() {
    local project
    project=$(lfs project -d "$1" 2> /dev/null | awk '{ print $1; exit }') || project=0
    {
        lfs quota -q -u "$(id -un)" "$1" 2> /dev/null | tr '\n' ' ' && echo
        lfs quota -q -g "$(stat -c %G -- "$1")" "$1" 2> /dev/null | tr '\n' ' ' && echo
        if [ "${project:-0}" != 0 ]; then lfs quota -q -p "$project" "$1" 2> /dev/null | tr '\n' ' ' && echo; fi
    } || true
}

# need_room FOLDER GB WHAT: remembered for check_room; folders of one disk are counted together.
need_room() {
    local folder disk
    folder=$(existing "$1")
    disk=$(disk_of "$folder")
    # A home of the same export as a group's folders has a quota of its own.
    if in_home "$folder"; then disk="home:$disk"; fi
    room_needed[$disk]="${room_needed[$disk]:-} $2:${3// /_}"
    room_folder[$disk]=$folder
    case " ${room_places[$disk]:-} " in *" $folder "*) ;; *) room_places[$disk]="${room_places[$disk]:-} $folder" ;; esac
}

in_home() {
    local home
    home=$(cd -- "${HOME:-/nonexistent}" 2> /dev/null && pwd -P) || return 1
    [ "$home" != / ] && case $1/ in "$home"/*) return 0 ;; *) return 1 ;; esac
}

# check_room: says what is needed and there, and ends with 2 when it isn't enough anywhere.
check_room() {
    local disk folder item sum words room who bad=0
    for disk in "${!room_needed[@]}"; do
        folder=${room_folder[$disk]} sum=0 words=
        for item in ${room_needed[$disk]}; do
            sum=$((sum + ${item%%:*}))
            words="$words${words:+, }${item#*:} ${item%%:*}"
        done
        read -r room who <<< "$(room_in "$folder")"
        room=$((room / 1000000000))
        echo "room:${room_places[$disk]}: $sum GB needed (${words//_/ }), $room GB free ($who)" >&2
        if [ "$room" -lt "$sum" ]; then
            echo "error:${room_places[$disk]}$(in_home "$folder" && echo ' (your home)') has room for $room GB by $who; $sum GB are needed" >&2
            bad=1
        elif [ "$who" = df ] && in_home "$folder" && is_shared "$folder"; then
            echo "error: $folder is in your home on a shared disk whose quota can't be read" >&2
            bad=1
        fi
    done
    [ "$bad" = 0 ] || { echo "  What to do: $home_is_refused; or --no-room-check if you know better" >&2; exit 2; }
}

is_shared() {
    case $(stat -f -c %T -- "$1") in
        nfs* | lustre | gpfs | fuse* | ceph | beegfs | panfs | *0x*) return 0 ;;
        *) return 1 ;;
    esac
}
