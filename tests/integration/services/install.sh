#!/usr/bin/env bash
# Installs the schedulers that the tests start, on Debian or Ubuntu as root; starts nothing. Exit code 77: can't be had here.
set -euo pipefail

packages=(munge slurmctld slurmd slurm-client slurmdbd mariadb-server gridengine-master gridengine-exec gridengine-client)
needed=(munged slurmctld slurmd slurmdbd sbatch mariadbd mariadb-install-db sge_qmaster sge_execd qsub)

missing() {
    local program
    for program in "${needed[@]}"; do
        command -v "$program" >/dev/null || printf '%s ' "$program"
    done
}
skip() {
    echo "services: $1; the tests against real schedulers will be skipped" >&2
    exit 77
}

[ -z "$(missing)" ] && exit 0
[ "$(id -u)" = 0 ] || skip "not root, and these programs are missing: $(missing)"
command -v apt-get >/dev/null || skip "no apt-get on this machine"

log=$(mktemp)
trap 'rm -f "$log"' EXIT
export DEBIAN_FRONTEND=noninteractive
# The packages would start their daemons with files in /etc; the tests start their own.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod +x "$policy"
    trap 'rm -f "$log" "$policy"' EXIT
fi
fetch=(-o Acquire::Retries=2 -o Acquire::http::Timeout=30 -o DPkg::Lock::Timeout=120)
{
    apt-get "${fetch[@]}" update
    echo "gridengine-common shared/gridengineconfig boolean false" | debconf-set-selections
    apt-get "${fetch[@]}" install -y --no-install-recommends "${packages[@]}"
} >"$log" 2>&1 </dev/null || { tail -n 20 "$log" >&2; skip "apt-get could not install ${packages[*]}"; }
[ -z "$(missing)" ] || skip "installed, but these programs are missing: $(missing)"
