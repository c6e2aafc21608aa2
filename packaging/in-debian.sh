#!/bin/bash
# Runs a command in a root of Debian that has a newer Open MPI than this machine: for `cargo xtask bench mpi`.
#
#   sudo packaging/in-debian.sh FOLDER COMMAND…
#
# FOLDER must not exist the first time: debootstrap makes it, from the network, and it is kept (700 MB): Debian 13, or what SUITE
# says, with Open MPI and a C compiler. APT_SETTINGS: lines for its apt.conf. The checkout has the same path there, so what was built here is found; the environment is kept.
set -euo pipefail
root=$(realpath -m "${1:?the folder}"); shift
here=$(realpath "$(dirname "$0")/..")
if [ ! -e "$root/.ready" ]; then
    # This runs as root: only what it made itself is removed.
    refuse() { echo "$1 exists and is not a root that $0 has finished: remove it or name another folder" >&2; exit 1; }
    new=$root.new
    if [ -e "$root" ]; then refuse "$root"; fi
    if [ -e "$new" ] && [ ! -e "$new/.in-debian" ]; then refuse "$new"; fi
    rm -rf --one-file-system "$new"
    mkdir -p "$new"; touch "$new/.in-debian"
    debootstrap --variant=minbase --include=ca-certificates "${SUITE:-trixie}" "$new" >&2
    cp -L /etc/resolv.conf "$new/etc/resolv.conf"
    cp -L /etc/ssl/certs/ca-certificates.crt "$new/etc/ssl/certs/"  # a proxy may have certificates of its own
    printf "%s\n" "${APT_SETTINGS:-}" > "$new/etc/apt/apt.conf.d/settings"
    chroot "$new" bash -euc 'apt-get update -q
        DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends openmpi-bin libopenmpi-dev gcc libc6-dev' >&2
    mkdir -p "$new$here"; touch "$new/.ready"
    mv "$new" "$root"
fi
exec unshare --mount --pid --fork --ipc bash -ec '
    root=$1 here=$2; shift 2
    mount --make-rprivate /; mount --bind "$root" "$root"; mount -t proc proc "$root/proc"; mount --rbind /sys "$root/sys"
    mount --rbind /dev "$root/dev"; mount --bind "$here" "$root$here"
    exec chroot "$root" env OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 bash -ec '\''cd "$0"; exec "$@"'\'' "$here" "$@"
' - "$root" "$here" "$@"
