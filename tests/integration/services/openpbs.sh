#!/usr/bin/env bash
# OpenPBS on this machine, one node with four CPUs, without systemd:
#     OPENPBS=PREFIX openpbs.sh start FOLDER    prints the line that makes its commands use it
#     OPENPBS=PREFIX openpbs.sh stop FOLDER
# PREFIX is where build_openpbs.sh has installed it, or its source, which is then built first (12 minutes on 2 cores).
# OpenPBS wants a host name that isn't a loopback address, and a home whose parents only root can write. It gets both in
# a network, a hostname and a mount namespace of its own, which its commands enter and which end with the stop.
set -eEuo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:?start or stop}
state=$(mkdir -p "${2:?a folder for state and logs}" && cd "$2" && pwd)
# shellcheck source=tests/integration/services/daemons.sh
. "$here/daemons.sh"
OPENPBS=$(realpath "${OPENPBS:?the prefix of an installed OpenPBS, or its source}")
[ ! -e "$OPENPBS/autogen.sh" ] || OPENPBS=$OPENPBS/installed
host=tests-pbs home=/var/spool/pbs
export PBS_CONF_FILE=$state/pbs.conf

# What the namespaces' first process does.
enter_namespaces() {
    hostname "$host"
    ip link set lo up
    ip address add 10.99.0.1/32 dev lo
    mount --bind "$state/hosts" /etc/hosts
    mount -t tmpfs -o mode=755 tmpfs "$(dirname "$home")"
    mount -t tmpfs -o mode=1777 tmpfs /run/postgresql # sockets, which two servers must not share
    # Jobs have a login shell, which finds the commands as on a cluster, and not those of an installed Grid Engine.
    mount --bind "$state/profile.d" /etc/profile.d
    touch "$state/namespaces"
    exec sleep infinity
}

# inside COMMAND...: run it in the namespaces.
inside() { nsenter --target "$(cat "$state/namespaces.daemon")" --mount --net --uts --wd="$PWD" "$@"; }

# daemon NAME WORD...: in the namespaces, in the foreground.
daemon() {
    local name=$1
    shift
    launch "$name" nsenter --target "$(cat "$state/namespaces.daemon")" --mount --net --uts --wd=/ \
        "$OPENPBS/sbin/$name" -N "$@"
}

write_configuration() {
    local program
    mkdir -p "$state"/{log,bin,profile.d}
    echo "export PBS_CONF_FILE='$PBS_CONF_FILE' PATH='$OPENPBS/bin':\$PATH" >"$state/profile.d/pbs.sh"
    printf '127.0.0.1 localhost\n10.99.0.1 %s\n' "$host" >"$state/hosts"
    cat >"$PBS_CONF_FILE" <<CONF
PBS_EXEC=$OPENPBS
PBS_HOME=$home
PBS_SERVER=$host
PBS_START_SERVER=1
PBS_START_SCHED=1
PBS_START_COMM=1
PBS_START_MOM=1
CONF
    for program in "$OPENPBS"/bin/*; do
        cat >"$state/bin/${program##*/}" <<COMMAND
#!/bin/sh
export PBS_CONF_FILE='$PBS_CONF_FILE'
exec nsenter --target "\$(cat '$state/namespaces.daemon')" --mount --net --uts --wd="\$PWD" '$program' "\$@"
COMMAND
    done
    chmod 755 "$state" "$state"/bin/*
}

initialize() {
    inside "$OPENPBS/libexec/pbs_postinstall" server "" "$OPENPBS" "$home" "" sameconf
    inside env PBS_DATA_SERVICE_USER=postgres PBS_DATA_SERVICE_PORT=15007 \
        sh -c ". '$OPENPBS/libexec/pbs_db_env' && '$OPENPBS/libexec/pbs_db_utility' install_db"
}

configure() {
    qmgr -c "create queue workq queue_type=execution,enabled=true,started=true"
    # Root may submit, ended jobs are kept, and jobs start at once.
    qmgr -c "set server default_queue=workq,acl_roots=root,job_history_enable=true,flatuid=true"
    # As many CPUs as a test asks for, whatever the machine has.
    qmgr -c "create node $host resources_available.ncpus=4"
}

start() {
    trap 'tail -n 20 "$state"/log/* >&2' ERR
    [ -x "$OPENPBS/sbin/pbs_server" ] || "$here/build_openpbs.sh" "${OPENPBS%/installed}" "$OPENPBS"
    write_configuration
    export PATH=$state/bin:$PATH
    rm -f "$state/namespaces"
    launch namespaces unshare --mount --net --uts "$0" enter_namespaces "$state"
    wait_for namespaces test -e "$state/namespaces"
    initialize >"$state/log/initialize" 2>&1
    daemon pbs_comm
    daemon pbs_server -t create
    wait_for pbs_server qmgr -c "print server"
    configure >"$state/log/configure" 2>&1
    daemon pbs_mom
    daemon pbs_sched
    wait_for pbs_mom node_is_up
    echo "export PATH=$PATH"
}

node_is_up() { pbsnodes -a | grep -q "state = free"; }

case $action in
start) start ;;
stop) end pbs_sched pbs_mom pbs_server pbs_comm namespaces ;;
enter_namespaces) enter_namespaces ;;
*) echo "openpbs.sh: start or stop" >&2 && exit 2 ;;
esac
