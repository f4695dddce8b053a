#!/usr/bin/env bash
# Grid Engine on this machine, one node with four slots and the parallel environment smp, without systemd:
#     grid_engine.sh start FOLDER    prints the lines that make its commands use it
#     grid_engine.sh stop FOLDER
# Everything it writes is in FOLDER. Start again after a stop, or while it runs: what has died is started.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:?start or stop}
state=$(mkdir -p "${2:?a folder for state and logs}" && cd "$2" && pwd)
# shellcheck source=tests/integration/services/daemons.sh
. "$here/daemons.sh"
host=$(hostname)
debian=/var/lib/gridengine
common=$state/root/default/common

# fill NAME: the file of that name in grid_engine/, with its @NAMES@ filled in.
fill() { sed -e "s#@STATE@#$state#g" -e "s#@HOST@#$host#g" "$here/grid_engine/$1" >"$state/$1"; }

write_configuration() {
    [ -e "$state/settings.sh" ] && return
    local port name
    mkdir -p "$common" "$state"/{log,qmaster,execd,spooldb}
    for name in bin lib util utilbin; do
        ln -sfn "$debian/$name" "$state/root/$name"
    done
    for name in bootstrap host queue pe_smp; do
        fill "$name"
    done
    mv "$state/bootstrap" "$common"
    echo "$host" >"$common/act_qmaster"
    # Where the host's name and localhost are both 127.0.0.1, they must be one host to Grid Engine.
    echo "$host localhost" >"$common/host_aliases"
    sed -e "s#^execd_spool_dir.*#execd_spool_dir $state/execd#" -e 's#^min_uid.*#min_uid 0#' -e 's#^min_gid.*#min_gid 0#' \
        -e 's#flush_time=[0-9:]*#flush_time=00:00:01#' -e 's#^load_report_time.*#load_report_time 00:00:05#' \
        /usr/share/gridengine/default-configuration >"$state/configuration"
    port=$(free_ports 2)
    cat >"$state/settings.sh" <<SETTINGS
export SGE_ROOT=$state/root
export SGE_CELL=default
export SGE_QMASTER_PORT=$port
export SGE_EXECD_PORT=$((port + 1))
SETTINGS
}

initialize() {
    [ -e "$state/spooldb/sge" ] && return
    local tools=/usr/lib/gridengine resources=/usr/share/gridengine/util/resources
    "$tools/spoolinit" berkeleydb libspoolb "$state/spooldb" init
    "$tools/spooldefaults" configuration "$state/configuration"
    "$tools/spooldefaults" complexes "$resources/centry"
    "$tools/spooldefaults" usersets "$resources/usersets"
    "$tools/spooldefaults" managers root
}

configure() {
    qconf -sq all.q && return
    qconf -ah "$host"
    qconf -as "$host"
    qconf -Ae "$state/host" || true # it is there when the daemon of the node was faster
    qconf -Ap "$state/pe_smp"
    qconf -Aq "$state/queue"
    # Jobs start at once instead of within 15 s.
    qconf -ssconf | sed -e 's/^schedule_interval .*/schedule_interval 0:0:1/' \
        -e 's/^flush_\(submit\|finish\)_sec .*/flush_\1_sec 1/' >"$state/scheduler"
    qconf -Msconf "$state/scheduler"
}

start() {
    write_configuration
    # shellcheck source=/dev/null
    . "$state/settings.sh"
    initialize >"$state/log/initialize" 2>&1
    SGE_ND=1 launch qmaster sge_qmaster
    wait_for qmaster qconf -sh
    configure >"$state/log/configure" 2>&1
    SGE_ND=1 launch execd sge_execd
    wait_for execd node_is_up
    cat "$state/settings.sh"
}

# The node has reported its load, and its queue is in no state of alarm or error.
node_is_up() { qstat -f | grep -Eq '^all\.q@\S+ +\S+ +\S+ +[0-9.]+ +\S+ *$'; }

case $action in
start) start ;;
stop) end execd qmaster ;;
*) echo "grid_engine.sh: start or stop" >&2 && exit 2 ;;
esac
