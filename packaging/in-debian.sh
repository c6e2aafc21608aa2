#!/bin/bash
# Runs a command in a root of Debian that has a newer Open MPI than this machine: for `cargo xtask bench mpi`.
#
#   sudo packaging/in-debian.sh FOLDER COMMAND…
#
# FOLDER is made at the first time, by debootstrap and from the network, and kept (700 MB): Debian 13, or what SUITE says, with
# Open MPI and a C compiler. The checkout has the same path there, so what was built here is found; the environment is kept.
set -euo pipefail
root=$(realpath -m "${1:?the folder}"); shift
here=$(realpath "$(dirname "$0")/..")
if [ ! -e "$root/.ready" ]; then
    rm -rf "$root"; mkdir -p "$root"
    debootstrap --variant=minbase --include=ca-certificates "${SUITE:-trixie}" "$root" >&2
    cp -L /etc/resolv.conf "$root/etc/resolv.conf"
    cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"  # a proxy may have certificates of its own
    echo 'Acquire::Check-Valid-Until "false";' > "$root/etc/apt/apt.conf.d/mirror"  # mirrors may be behind
    chroot "$root" bash -euc 'apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends openmpi-bin libopenmpi-dev gcc libc6-dev' >&2
    mkdir -p "$root$here"; touch "$root/.ready"
fi
exec unshare --mount --pid --fork --ipc bash -ec '
    root=$1 here=$2; shift 2
    mount --make-rprivate /; mount --bind "$root" "$root"; mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"; mount --bind "$here" "$root$here"
    exec chroot "$root" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 bash -ec '\''cd "$0"; exec "$@"'\'' "$here" "$@"
' - "$root" "$here" "$@"
