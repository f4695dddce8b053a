#!/usr/bin/env bash
# Slurm with accounting and two virtual nodes on this machine, without systemd:
#     slurm.sh start FOLDER    prints the line that makes Slurm's commands use it
#     slurm.sh stop FOLDER
# Everything it writes is in FOLDER, but for the nodes' names in /etc/hosts, which a stop takes away. Start again after a stop, or while it runs: what has died is started.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
action=${1:?start or stop}
state=$(mkdir -p "${2:?a folder for state and logs}" && cd "$2" && pwd)
export SLURM_CONF=$state/slurm.conf MYSQL_UNIX_PORT=$state/mariadb.socket
# shellcheck source=tests/integration/services/daemons.sh
. "$here/daemons.sh"

write_configuration() {
    [ -e "$SLURM_CONF" ] && return
    local port
    port=$(free_ports 4)
    sed -e "s#@STATE@#$state#g" -e "s#@HOST@#$(hostname)#g" -e "s#@PORT@#$port#" -e "s#@DBD_PORT@#$((port + 1))#" \
        -e "s#@NODE1_PORT@#$((port + 2))#" -e "s#@NODE2_PORT@#$((port + 3))#" "$here/slurm.conf.in" >"$SLURM_CONF"
    cat >"$state/slurmdbd.conf" <<CONF
AuthType=auth/munge
AuthInfo=socket=$state/munge.socket
DbdHost=localhost
DbdPort=$((port + 1))
SlurmUser=root
StorageType=accounting_storage/mysql
StorageHost=localhost
StorageUser=root
StorageLoc=slurm_acct_db
LogFile=$state/log/slurmdbd
PidFile=$state/slurmdbd.pid
CONF
    chmod 600 "$state/slurmdbd.conf"
}

# Jobs look up the names of their nodes. The line is this Slurm's own: another one may run.
names="127.0.0.1 tests-node1 tests-node2 # $state"
name_nodes() { grep -qxF "$names" /etc/hosts || echo "$names" >>/etc/hosts; }
unname_nodes() {
    local others
    others=$(grep -vxF "$names" /etc/hosts) || true
    printf '%s\n' "$others" >/etc/hosts # in place: in a container the file is a mount
}

start() {
    mkdir -p "$state"/{log,slurmctld,slurmd.tests-node1,slurmd.tests-node2}
    chmod 755 "$state"
    write_configuration
    name_nodes

    [ -e "$state/munge.key" ] || (umask 077 && head -c 128 /dev/urandom >"$state/munge.key")
    launch munged munged --foreground --force --socket="$state/munge.socket" --key-file="$state/munge.key" \
        --log-file="$state/log/munged" --pid-file="$state/munged.pid" --seed-file="$state/munge.seed" --num-threads=2
    wait_for munged munge -n -S "$state/munge.socket"

    [ -d "$state/mariadb/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$state/mariadb" \
        --auth-root-authentication-method=socket --skip-test-db >"$state/log/mariadb_install" 2>&1
    launch mariadb mariadbd --no-defaults --user=root --datadir="$state/mariadb" --socket="$MYSQL_UNIX_PORT" \
        --pid-file="$state/mariadb.pid" --skip-networking --innodb-buffer-pool-size=64M --innodb-lock-wait-timeout=900 \
        --innodb-flush-log-at-trx-commit=0
    wait_for mariadb mariadb --no-defaults --socket="$MYSQL_UNIX_PORT" -e "create database if not exists slurm_acct_db"

    launch slurmdbd slurmdbd -D
    wait_for slurmdbd sacctmgr -n show cluster
    sacctmgr -i add cluster tests >"$state/log/sacctmgr" 2>&1 || true # it is there already

    launch slurmctld slurmctld -D
    for node in tests-node1 tests-node2; do
        launch "slurmd.$node" slurmd -D -N "$node"
    done
    wait_for "slurmd" two_nodes_are_up
    echo "export SLURM_CONF=$SLURM_CONF"
}

two_nodes_are_up() {
    [ "$(sinfo --noheader --Node --responding --states=idle,mixed,allocated --format=%N | sort -u | wc -l)" = 2 ]
}

case $action in
start) start ;;
stop)
    end slurmd.tests-node1 slurmd.tests-node2 slurmctld slurmdbd mariadb munged
    unname_nodes
    ;;
*) echo "slurm.sh: start or stop" >&2 && exit 2 ;;
esac
