# Sourced by slurm.sh and grid_engine.sh: daemons without systemd, known by their process ids in $state.
# shellcheck shell=bash
: "${state:?}"

# What started us may hold locks and pipes open, which daemons must not keep.
for descriptor in /proc/"$$"/fd/*; do
    number=${descriptor##*/}
    [ "$number" -gt 2 ] && [ "$number" != 255 ] && eval "exec $number>&-"
done
unset descriptor number

# launch NAME COMMAND...: run a daemon in the foreground of its own session, unless it runs already.
launch() {
    local name=$1
    shift
    is_running "$name" && return
    setsid "$@" </dev/null >>"$state/log/$name.output" 2>&1 &
    echo $! >"$state/$name.daemon"
}

is_running() {
    local file=$state/$1.daemon
    [ -s "$file" ] && kill -0 "$(cat "$file")" 2>/dev/null
}

# wait_for NAME COMMAND...: until the command succeeds, 60 s at most; shows the daemon's log if it does not.
wait_for() {
    local name=$1 end=$((SECONDS + 60))
    shift
    while [ $SECONDS -lt $end ]; do
        "$@" >/dev/null 2>&1 && return
        sleep 0.2
    done
    echo "services: $name does not answer: $*" >&2
    "$@" >&2 || true
    tail -n 20 "$state"/log/"$name"* >&2 || true
    return 1
}

# end NAME...: in that order, each gone before the next is told.
end() {
    local name process
    for name in "$@"; do
        is_running "$name" || continue
        process=$(cat "$state/$name.daemon")
        kill "$process"
        for _ in $(seq 100); do
            kill -0 "$process" 2>/dev/null || break
            sleep 0.1
        done
        kill -KILL "$process" 2>/dev/null || true
        rm -f "$state/$name.daemon"
    done
}

# free_ports COUNT: the first of COUNT consecutive ports on which nothing listens.
free_ports() {
    local first port
    while :; do
        first=$((20000 + RANDOM % 10000))
        for ((port = first; port < first + $1; port++)); do
            (exec 3<>"/dev/tcp/127.0.0.1/$port") 2>/dev/null && continue 2
        done
        echo "$first"
        return
    done
}
