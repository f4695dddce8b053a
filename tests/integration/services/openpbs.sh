#!/usr/bin/env bash
# OpenPBS on this machine, two nodes with four CPUs each, without systemd:
#     OPENPBS=PREFIX openpbs.sh start FOLDER    prints the line that makes its commands use it
#     OPENPBS=PREFIX openpbs.sh stop FOLDER
# PREFIX is where build_openpbs.sh has installed it, or its source, which is then built first (6 to 12 minutes on 2 cores).
# OpenPBS wants a host name that isn't a loopback address, and a home whose parents only root can write. Each node gets
# both in a network, a hostname and a mount namespace of its own, which end with the stop. The first is the server, too;
# commands enter its namespaces.
set -eEuo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:?start or stop}
state=$(mkdir -p "${2:?a folder for state and logs}" && cd "$2" && pwd)
# shellcheck source=tests/integration/services/daemons.sh
. "$here/daemons.sh"
OPENPBS=$(realpath "${OPENPBS:?the prefix of an installed OpenPBS, or its source}")
[ ! -e "$OPENPBS/autogen.sh" ] || OPENPBS=$OPENPBS/installed
hosts=(tests-pbs1 tests-pbs2) home=/var/spool/pbs
export PBS_CONF_FILE=$state/pbs.conf

# enter_namespaces NUMBER: what the first process of a node's namespaces does.
enter_namespaces() {
    hostname "${hosts[$1]}"
    ip link set lo up
    mount --bind "$state/hosts" /etc/hosts
    mount -t tmpfs -o mode=755 tmpfs "$(dirname "$home")"
    mount -t tmpfs -o mode=1777 tmpfs /run/postgresql # sockets, which two servers must not share
    # Jobs have a login shell, which finds the commands as on a cluster, and not those of an installed Grid Engine.
    mount --bind "$state/profile.d" /etc/profile.d
    touch "$state/namespaces$1"
    exec sleep infinity
}

# inside NUMBER COMMAND...: run it in the namespaces of a node.
inside() { nsenter --target "$(cat "$state/namespaces$1.daemon")" --mount --net --uts --wd="$PWD" "${@:2}"; }

# daemon NUMBER NAME WORD...: on a node, in the foreground.
daemon() {
    launch "$2$1" nsenter --target "$(cat "$state/namespaces$1.daemon")" --mount --net --uts --wd=/ \
        "$OPENPBS/sbin/$2" -N "${@:3}"
}

start_namespaces() {
    local number
    rm -f "$state"/namespaces[01]
    for number in 0 1; do
        launch "namespaces$number" unshare --mount --net --uts "$0" enter_namespaces "$state" "$number"
        wait_for "namespaces$number" test -e "$state/namespaces$number"
    done
    inside 0 ip link add pbs type veth peer name pbs netns "$(cat "$state/namespaces1.daemon")"
    for number in 0 1; do
        inside "$number" ip address add "10.99.0.$((number + 1))/24" dev pbs
        inside "$number" ip link set pbs up
    done
}

write_configuration() {
    local program
    mkdir -p "$state"/{log,bin,profile.d}
    echo "export PBS_CONF_FILE='$PBS_CONF_FILE' PATH='$OPENPBS/bin':\$PATH" >"$state/profile.d/pbs.sh"
    printf '127.0.0.1 localhost\n10.99.0.1 %s\n10.99.0.2 %s\n' "${hosts[@]}" >"$state/hosts"
    cat >"$PBS_CONF_FILE" <<CONF
PBS_EXEC=$OPENPBS
PBS_HOME=$home
PBS_SERVER=${hosts[0]}
PBS_START_SERVER=1
PBS_START_SCHED=1
PBS_START_COMM=1
PBS_START_MOM=1
CONF
    for program in "$OPENPBS"/bin/*; do
        cat >"$state/bin/${program##*/}" <<COMMAND
#!/bin/sh
export PBS_CONF_FILE='$PBS_CONF_FILE'
exec nsenter --target "\$(cat '$state/namespaces0.daemon')" --mount --net --uts --wd="\$PWD" '$program' "\$@"
COMMAND
    done
    chmod 755 "$state" "$state"/bin/*
}

initialize() {
    inside 0 "$OPENPBS/libexec/pbs_postinstall" server "" "$OPENPBS" "$home" "" sameconf
    inside 1 "$OPENPBS/libexec/pbs_postinstall" execution "" "$OPENPBS" "$home" sameconf
    # It doesn't wait until PostgreSQL has started, which takes a busy machine longer.
    wait_for initialize inside 0 env PBS_DATA_SERVICE_USER=postgres PBS_DATA_SERVICE_PORT=15007 \
        sh -c ". '$OPENPBS/libexec/pbs_db_env' && '$OPENPBS/libexec/pbs_db_utility' install_db"
}

configure() {
    qmgr -c "create queue workq queue_type=execution,enabled=true,started=true"
    # Root may submit, ended jobs are kept, and jobs start at once.
    qmgr -c "set server default_queue=workq,acl_roots=root,job_history_enable=true,flatuid=true"
    # As many CPUs as a test asks for, whatever the machine has.
    qmgr -c "create node ${hosts[0]} resources_available.ncpus=4"
    qmgr -c "create node ${hosts[1]} resources_available.ncpus=4"
}

start() {
    trap 'tail -n 20 "$state"/log/* >&2' ERR
    [ -x "$OPENPBS/sbin/pbs_server" ] || "$here/build_openpbs.sh" "${OPENPBS%/installed}" "$OPENPBS"
    write_configuration
    export PATH=$state/bin:$PATH
    start_namespaces
    initialize >"$state/log/initialize" 2>&1
    daemon 0 pbs_comm
    daemon 0 pbs_server -t create
    wait_for pbs_server0 qmgr -c "print server"
    configure >"$state/log/configure" 2>&1
    daemon 0 pbs_mom
    daemon 1 pbs_mom
    daemon 0 pbs_sched
    wait_for pbs_mom nodes_are_up
    echo "export PATH=$PATH"
}

nodes_are_up() { [ "$(pbsnodes -a | grep -c "state = free")" = 2 ]; }

case $action in
start) start ;;
stop) end pbs_sched0 pbs_mom1 pbs_mom0 pbs_server0 pbs_comm0 namespaces1 namespaces0 ;;
enter_namespaces) enter_namespaces "$3" ;;
*) echo "openpbs.sh: start or stop" >&2 && exit 2 ;;
esac
