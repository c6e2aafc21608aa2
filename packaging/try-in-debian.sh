#!/bin/bash
# Tries the packages as a new user would: in a fresh Debian, as an ordinary user. Installs the deb and the wheel, then
# doctor, topo, bench, perftest, Open MPI, mpi4py and NIXL on the software Gaudi as docs/ describes it, then removal.
#
#   cargo xtask package deb wheel && sudo packaging/try-in-debian.sh target/package
#
# Needs root, debootstrap and the network, about 3 GB in TMPDIR and ten minutes. Everything happens in one folder and in
# namespaces of its own, and is removed at the end. SUITE names another release of Debian than 12 (bookworm): trixie and sid have an
# Open MPI whose collectives work on Gaudi memory. APT_SETTINGS: lines for its apt.conf.
set -euo pipefail
packages=$(realpath "${1:?the folder with the packages}")
root=$(mktemp -d)
chmod 755 "$root" # as a root folder is
trap 'rm -rf "$root"' EXIT

# as USER: runs the script on standard input there.
as() {
    cat > "$root/tmp/script" # a program that reads standard input must not take it from the shell
    unshare --mount --pid --fork --ipc bash -c '
        set -e; r=$1; shift
        mount --make-rprivate /
        mount --bind "$r" "$r"; mount -t proc proc "$r/proc"; mount --rbind /sys "$r/sys"
        mount -t tmpfs -o mode=755 dev "$r/dev"
        for node in null zero full random urandom tty ptmx; do touch "$r/dev/$node"; mount --bind "/dev/$node" "$r/dev/$node"; done
        ln -s /proc/self/fd "$r/dev/fd"; mkdir "$r/dev/shm" "$r/dev/pts"; mount -t devpts devpts "$r/dev/pts"; mount -t tmpfs -o mode=1777 shm "$r/dev/shm"
        exec chroot --userspec="$1" "$r" env -i HOME="$2" PATH=/usr/sbin:/usr/bin:/sbin:/bin LANG=C.UTF-8 \
            PIP_CERT=/etc/ssl/certs/ca-certificates.crt DEBIAN_FRONTEND=noninteractive bash -euo pipefail /tmp/script < /dev/null
    ' - "$root" "$1" "$([ "$1" = root ] && echo /root || echo "/home/$1")"
}
step() { printf '\n== %s\n' "$*"; }

step "a new Debian"
debootstrap --variant=minbase --include=ca-certificates "${SUITE:-bookworm}" "$root" > /dev/null
# A proxy may have certificates of its own.
cp -L /etc/resolv.conf "$root/etc/resolv.conf"
cp -L /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
printf "%s\n" "${APT_SETTINGS:-}" > "$root/etc/apt/apt.conf.d/settings"
cp -r "$packages" "$root/packages"
as root <<< "useradd -m anna; apt-get update -q > /dev/null
             apt-get install -y -q --no-install-recommends python3-venv gcc libc6-dev > /dev/null"

step "deb: install; doctor without a UCX says what is missing"
as root <<< "cd /packages; apt-get install -y -q ./ucx-gaudi_[0-9]*.deb ./ucx-gaudi-soft_[0-9]*.deb | tail -n 2"
as anna <<< "cd; cp -r /usr/share/doc/ucx-gaudi/examples .; ucx-gaudi doctor --soft > said && exit 9; grep -A 1 'no libucp.so' said"

step "deb: doctor, topo, bench, perftest"
as anna <<'S'
cd; python3 -m venv ucx; ucx/bin/pip install -q libucx-cu12==1.22.0
. ucx/bin/activate
export UCX=$(python3 -c 'import libucx; print(libucx.__path__[0])')
ucx-gaudi doctor --soft --ucx $UCX
ucx-gaudi topo --soft=2
ucx-gaudi bench --soft=2 --ucx $UCX -n 1 --save bench.json
export LD_LIBRARY_PATH=$UCX/lib PATH=$UCX/bin:$PATH
ucx-gaudi run --soft -- ucx_perftest -l -t tag_lat -m gaudi -n 100 -s 4096 -f
S

step "deb: Open MPI (docs/mpi.md)"
as root <<< "apt-get install -y -q --no-install-recommends openmpi-bin libopenmpi-dev python3-dev > /dev/null"
cat > "$root/home/anna/mpi" <<'S'
export LD_LIBRARY_PATH=$UCX/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
ucx-gaudi run --soft=${RANKS:-2} -- mpirun -np ${RANKS:-2} --oversubscribe "$@"
S
as anna <<'S'
cd; . ucx/bin/activate; export UCX=$(python3 -c 'import libucx; print(libucx.__path__[0])')
mpicc -I$UCX/include examples/mpi_ring.c -o mpi_ring -L$UCX/lib -Wl,--allow-shlib-undefined -lucp -lucs
bash mpi ./mpi_ring window
if mpirun --version | grep -q ' 4\.'; then
    echo "skipped: collectives, which need Open MPI 5"
else
    mpicc -I/usr/include examples/mpi_collectives.c -o mpi_collectives -L/usr/lib/ucx-gaudi -lucx_gaudi -Wl,-rpath,/usr/lib/ucx-gaudi
    bash mpi ./mpi_collectives 16777216
    RANKS=4 bash mpi ./mpi_collectives 600
    mpicc -O2 examples/mpi_bench.c -o mpi_bench -L/usr/lib/ucx-gaudi -lucx_gaudi -Wl,-rpath,/usr/lib/ucx-gaudi
    bash mpi ./mpi_bench 4194304 1
fi
S

step "deb: removal"
as root <<< "apt-get remove -y -q ucx-gaudi | tail -n 1"
test -z "$(find "$root/usr" -name '*ucx-gaudi*' -o -name '*ucx_gaudi*')"

step "wheel: install; doctor, bench, mpi4py, NIXL (docs/nixl.md)"
as anna <<'S'
cd; . ucx/bin/activate; export UCX=$(python3 -c 'import libucx; print(libucx.__path__[0])')
pip install -q --no-index /packages/ucx_gaudi-[0-9]*.whl /packages/ucx_gaudi_soft-[0-9]*.whl
pip install -q mpi4py
ucx-gaudi doctor --soft
ucx-gaudi bench --soft=2 --ucx $UCX --ops tag --sizes 8,64K -n 1
bash mpi python3 examples/mpi_ring.py
pip install -q --no-deps nixl-cu12==1.5.1 numpy
mkdir -p no-rdma && : > no-rdma/libefa.so.1 && : > no-rdma/libibverbs.so.1
LD_LIBRARY_PATH=$PWD/no-rdma ucx-gaudi run --soft=2 -- python3 examples/kv_cache.py --layers 4 --blocks 64 --operation READ
S

step "wheel: removal"
as anna <<'S'
cd; . ucx/bin/activate; pip uninstall -q -y ucx-gaudi-soft ucx-gaudi
test -z "$(find ucx -name '*ucx-gaudi*' -o -name '*ucx_gaudi*')"
S
step "all of it worked"
