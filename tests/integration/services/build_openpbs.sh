#!/usr/bin/env bash
# build_openpbs.sh SOURCE PREFIX: builds OpenPBS (github.com/openpbs/openpbs, 23.06) with the packages of Debian or Ubuntu,
# which it installs. 6 to 12 minutes on 2 cores. The tag v23.06.06 doesn't build with Python 3.11 and later; the newest source does.
set -euo pipefail
source=${1:?folder of the source}
prefix=${2:?folder to install to}
packages=(gcc g++ make libtool autoconf automake pkg-config libhwloc-dev libx11-dev libxt-dev libedit-dev libical-dev
    libncurses-dev postgresql postgresql-server-dev-all python3-dev tcl-dev tk-dev swig libexpat1-dev libssl-dev
    libxext-dev libxft-dev libcjson-dev)

DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${packages[@]}" </dev/null
cd "$source"
# The tests' jobs are root's, whose processes pbs_mom doesn't count: it would take every job for ended that it signals.
sed -i 's/ || (sbuf.st_uid == 0)//' src/resmom/linux/mom_mach.c
./autogen.sh
# Python of the system: another in PATH may lack its shared library.
PATH=/usr/sbin:/usr/bin:/sbin:/bin ./configure --prefix="$prefix"
make -j "$(nproc)"
make install
