#!/bin/bash
# Sets up Slurm on this machine, two nodes by name, and runs the scripts of examples/slurm there on software cards, as an ordinary user.
#
#   cargo xtask setup && cargo xtask build && sudo packaging/try-in-slurm.sh target/dist target/stock
#
# Needs root, Debian's slurm-wlm and munge, and for MPI openmpi-bin and libopenmpi-dev. Daemons, configuration and cards are in one folder
# and in namespaces of their own, and end with the script; no file of this machine's own Slurm is read. TRY_USER: another user than nobody.
set -euo pipefail
prefix=$(realpath "${1:?the folder where ucx-gaudi is installed}") stock=$(realpath "${2:?the folder with ucx and nixl}")
examples=$(realpath "$(dirname "$0")/../examples") me=$(realpath "$0")
for tool in slurmctld slurmd srun munged ip; do
    command -v $tool > /dev/null || { echo "skipped: no $tool (apt install slurm-wlm munge iproute2)"; exit 0; }
done
if [ "${TRY_IN_SLURM:-}" != inside ]; then
    TRY_IN_SLURM=inside exec unshare --mount --pid --fork --kill-child --mount-proc --uts --ipc --net bash "$me" "$prefix" "$stock"
fi
mount --make-rprivate /
mount -t tmpfs -o mode=1777 shm /dev/shm
# Slurm looks up addresses only where an interface besides the loopback has one.
ip link set lo up
ip link add eth0 type veth peer name eth1
ip address add 10.9.0.1/24 dev eth0
ip link set eth0 up
ip link set eth1 up
hostname localhost
work=$(mktemp -d)
chmod 755 "$work"
mkdir -m 1777 "$work/home"
cgroups=()
end() {
    status=$?
    [ $status = 0 ] || tail -n 8 "$work"/slurm*.log
    for group in "${cgroups[@]}"; do find "/sys/fs/cgroup/$group" -depth -type d -path "*slurm_n[12]*" -exec rmdir {} \; 2> /dev/null || true; done
    rm -rf "$work"
}
trap end EXIT
user() { setpriv --reuid "${TRY_USER:-nobody}" --regid "$(id -g "${TRY_USER:-nobody}")" --clear-groups -- "$@"; }
step() { printf '\n== %s\n' "$*"; }

step "munge, slurmctld, two slurmd"
mkdir "$work/munge" "$work/state"
head -c 64 /dev/urandom > "$work/munge/key"
chmod 400 "$work/munge/key"
munged --force --key-file="$work/munge/key" --socket="$work/munge/socket" --pid-file="$work/munge/pid" \
    --log-file="$work/munge.log" --seed-file="$work/munge/seed" 2> /dev/null
# Stand-ins for /dev/accel/accelN, of a major number without a driver: for Slurm, which counts, gives and forbids them. The software
# cards are files of the user's.
for node in n1 n2; do
    mkdir "$work/$node"
    for card in 0 1; do mknod -m 666 "$work/$node/accel$card" c 240 "$((${node#n} * 2 + card))"; done
    echo "NodeName=$node Name=gpu Type=gaudi2 File=$work/$node/accel[0-1]" >> "$work/gres.conf"
done
# Each node has software cards of its own.
cat > "$work/task_prolog" <<C
#!/bin/sh
echo "export SOFT_GAUDI_NODE=\$SLURMD_NODENAME"
export SOFT_GAUDI_NODE="\$SLURMD_NODENAME"
exec $examples/slurm/task_prolog.sh
C
chmod 755 "$work/task_prolog"
configure() { # PROCTRACK TASK-PLUGIN
    cat > "$work/slurm.conf" <<C
ClusterName=trial
SlurmctldHost=localhost
SlurmUser=root
AuthInfo=socket=$work/munge/socket
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool.%n
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.%n.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.%n.log
SlurmdParameters=config_overrides
ProctrackType=$1
TaskPlugin=$2
TaskProlog=$work/task_prolog
SelectType=select/cons_tres
ReturnToService=2
TmpFS=$work/tmp.%n
GresTypes=gpu
NodeName=n[1-2] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[17001-17002] CPUs=4 Gres=gpu:gaudi2:2
PartitionName=all Nodes=ALL Default=YES
C
}
start() {
    slurmctld
    for node in n1 n2; do mkdir -p "$work/spool.$node"; mkdir -p -m 1777 "$work/tmp.$node"; slurmd -N $node; done
    for _ in $(seq 50); do [ "$(sinfo -h -N -t idle -o %N | wc -l)" = 2 ] && break; sleep 0.2; done
    sinfo -N -o '%N %t %G'
}
stop() {
    local file pid
    for file in "$work"/slurmd.n?.pid "$work/slurmctld.pid"; do
        pid=$(cat "$file")
        kill "$pid"
        while [ -d "/proc/$pid" ]; do sleep 0.1; done
    done
}
export SLURM_CONF=$work/slurm.conf
configure proctrack/linuxproc task/none
start

# What a user of a cluster has from modules or the image; the software card in the place of the driver library.
export PATH=$prefix/bin:$PATH LD_LIBRARY_PATH=$stock/ucx/libucx/lib HOME=$work/home EXAMPLES=$examples PYTHONPATH=$stock/nixl
export HL_THUNK_LIBRARY=$prefix/lib/ucx-gaudi/soft/gaudi/libhl-thunk.so SOFT_GAUDI_DEVICES=2
cd "$work/home"
batch() {
    local status=0
    user sbatch --quiet --wait --output="$work/home/said" "$examples/slurm/$1" || status=$?
    grep -v "^soft-gaudi: the kernel does not pin" "$work/home/said"
    return $status
}
step "check.sbatch"
batch check.sbatch
step "kv_cache.sbatch"
batch kv_cache.sbatch
step "mpi.sbatch"
if command -v mpicc > /dev/null; then
    ucx=$stock/ucx/libucx
    mpicc -I"$ucx/include" "$examples/mpi_ring.c" -o mpi_ring -L"$ucx/lib" -Wl,--allow-shlib-undefined -lucp -lucs
    PROGRAM=$PWD/mpi_ring batch mpi.sbatch
else
    echo "skipped: no mpicc (apt install openmpi-bin libopenmpi-dev)"
fi

step "what a task sees: --gres and TaskProlog"
see='echo "cards $SLURM_STEP_GPUS of $SLURMD_NODENAME, HABANA_VISIBLE_MODULES=$HABANA_VISIBLE_MODULES, local rank $SLURM_LOCALID"'
task() { user srun --quiet "$@"; }
task -l -N 2 --ntasks-per-node=2 --gres=gpu:gaudi2:2 bash -c "$see" | sort
task -l -w n2 -n 1 --gres=gpu:gaudi2:1 bash -c "$see" # one of two
task -l -N 1 -n 1 bash -c "$see" # none was asked for: none is hidden

# Prints the lines of the plugin and the verdicts; fails if none has the words.
expect() { # WORDS COMMAND…
    local words=$1 said
    shift
    said=$({ "$@" 2>&1 || true; } | grep -o 'passed, .*\|ucx-gaudi \(ERROR\|WARN\|INFO\).*\|^accel.*' | grep -v 'env variables\|to other processes' | sort -u)
    echo "$said"
    grep -q "$words" <<< "$said" || { echo "expected: $words"; exit 1; }
}
step "local-rank: more tasks than the job has cards"
use='ucx-gaudi run -q -- ucp-check loopback --ops put --mem host:gaudi --sizes 8'
expect 'no card for local rank 1' task -w n1 -n 2 --gres=gpu:gaudi2:1 bash -c "UCX_GAUDI_COPY_DEVICE=local-rank $use"

step "a card whose node cannot be opened: file of the card, then as a cgroup does it (control node answers, EPERM)"
cards='export UCX_LOG_LEVEL=info; cd /dev/shm/soft-gaudi-$(id -u)/n1/gaudi2'
expect 'card 0 is left out: .*Permission denied' task -w n1 -n 1 --gres=gpu:gaudi2:2 bash -c "$cards; chmod 000 accel0; $use; chmod 600 accel0"
expect 'Operation not permitted.*the next card is tried' task -w n1 -n 1 --gres=gpu:gaudi2:2 \
    bash -c "$cards; echo 'hlthunk_open fail:EPERM times=1' > faults; SOFT_GAUDI_FAULTS=yes $use"

step "cgroup: ConstrainDevices"
if [ -d /sys/fs/cgroup/devices ]; then
    stop
    cgroups=(cpuset memory freezer devices cpu cpuacct)
    configure proctrack/cgroup task/cgroup
    printf 'ConstrainDevices=yes\nCgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=cgroup/v1\n' > "$work/cgroup.conf"
    start
    open='for node in accel0 accel1; do echo "$node: $( (: < '"$work"'/n1/$node) 2>&1 | sed "s/.*: //")"; done'
    # The stand-ins have no driver: the one that was given does not exist, the other is forbidden.
    expect 'accel1: Operation not permitted' task -w n1 -n 1 --gres=gpu:gaudi2:1 bash -c "$open"
else
    echo "skipped: no cgroup v1 with the device controller"
fi
