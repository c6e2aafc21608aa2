#!/bin/busybox sh
# First program of the virtual machine: loads the driver, runs the sets of checks that VM_SETS names (or a shell), and
# powers off. Results go to the first serial port, the kernel's messages to the second, recordings to the third, what
# checks print to the fourth.
/bin/busybox mkdir -p /proc /sys /dev /tmp /run
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev
mkdir -p /dev/shm
mount -t tmpfs tmpfs /dev/shm
mount -t debugfs debugfs /sys/kernel/debug
ip link set lo up
exec </dev/ttyS0 >/dev/ttyS0 2>&1
export PATH=/opt/gaudi/bin:/opt/ucx/bin:/bin
export LD_LIBRARY_PATH=/opt/thunk:/opt/ucx/lib:/opt/ucx-libs
export UCX_PLUGIN_PATH=/opt/gaudi/lib/ucx-gaudi/plugins HOME=/tmp

milliseconds() { awk '{ printf "%d", $1 * 1000 }' /proc/uptime; }

# Whether a command prints a text.
says() {
    text=$1
    shift
    "$@" >/tmp/said 2>&1
    cat /tmp/said
    grep -q "$text" /tmp/said
}

# Runs a command as a check; its output is shown only when it fails.
check() {
    name=$1
    shift
    began=$(milliseconds)
    if "$@" >/tmp/output 2>&1; then verdict=ok; else verdict=failed; fi
    echo "VM-RESULT $verdict $name $(($(milliseconds) - began))"
    [ $verdict = ok ] || tail -n 40 /tmp/output
    { echo "== $name: $verdict"; cat /tmp/output; } >/dev/ttyS3
}

card=/sys/class/accel/accel0/device

# Waits for a text in a file of the card.
attribute() {
    for _ in $(seq 50); do
        [ "$(cat $card/$1)" = "$2" ] && return 0
        sleep 0.1
    done
    echo "$1 is $(cat $card/$1), not $2"
    return 1
}

load() { insmod /mod/drm.ko && insmod /mod/habanalabs.ko && [ -c /dev/accel/accel0 ]; }
usable() { dmesg | grep -q 'Successfully added device' && ! dmesg | grep -E 'NOT usable|Failed to initialize'; }
forget_messages() { dmesg -c >/dev/null; }
no_warnings() { ! dmesg | grep -E 'WARNING:|BUG:|Oops|soft lockup'; }

set_probe() {
    check status attribute status Operational
    check type attribute device_type GAUDI2
    check temperature sh -c "cat $card/hwmon/hwmon*/temp1_input | grep 42000"
    check hard-reset hard_reset
    check remove rmmod habanalabs
    check probe-again insmod /mod/habanalabs.ko
    check status-again attribute status Operational
}

# The module as Debian ships it. Nobody can open a card with it, and the tools name the reason.
names_the_bug() { says 'opens no card since 6.12' "$@"; }
refused_open() {
    opens 2>/tmp/open && return 1
    cat /tmp/open
    grep -q 'Invalid argument' /tmp/open
}
set_unpatched() {
    check load-unpatched reload habanalabs-unpatched
    check control-node control_node
    check open-refused refused_open
    check doctor-names-the-bug names_the_bug ucx-gaudi doctor --card 0
    check check-card-names-the-bug names_the_bug ucx-gaudi check-card --card 0
    check plugin-names-the-bug names_the_bug ucx_perftest -t tag_lat -m gaudi -n 1 -s 8 -l
    # DRM's own warning, once for each module.
    check kernel-warns sh -c 'dmesg | grep "WARNING:.*drm_open_helper"'
    forget_messages
    check load-again reload habanalabs
}
reload() { rmmod habanalabs && insmod /mod/$1.ko && attribute status Operational; }

hard_reset() {
    before=$(cat $card/hard_reset_cnt)
    echo 1 >$card/hard_reset
    attribute status Operational && [ "$(cat $card/hard_reset_cnt)" -gt "$before" ]
}

# One process at a time computes on a card. Closing it resets it, and opens fail meanwhile.
opens() { (exec 3<>/dev/accel/accel${1:-0}); }
opens_within_10_s() {
    for _ in $(seq 100); do
        opens 2>/tmp/open && return 0
        sleep 0.1
    done
    cat /tmp/open
    return 1
}
busy() {
    exec 4<>/dev/accel/accel0 || return 1
    (opens) 2>/tmp/open
    refused=$?
    exec 4>&-
    cat /tmp/open
    [ $refused != 0 ] && grep -q 'resource busy' /tmp/open && opens_within_10_s
}
again_while_closing() {
    sh -c 'exec 4<>/dev/accel/accel0; echo open >/tmp/closing; sleep 0.5' &
    until [ -s /tmp/closing ]; do sleep 0.1; done
    # Busy while it is open, then EAGAIN while it is closed.
    until (opens) 2>/tmp/open || ! grep -q 'resource busy' /tmp/open; do :; done
    wait
    cat /tmp/open
    grep -q 'temporarily unavailable' /tmp/open && opens_within_10_s
}
kill_owner() {
    sh -c 'exec 4<>/dev/accel/accel0; echo open >/tmp/owner; exec sleep 100' &
    owner=$!
    until [ -s /tmp/owner ]; do sleep 0.1; done
    ! (opens) 2>/dev/null && kill -9 $owner && opens_within_10_s
}
control_node() { exec 5<>/dev/accel/accel_controlD0 && exec 6<>/dev/accel/accel_controlD0 && exec 5>&- 6>&-; }

set_card() {
    check control-node-for-many control_node
    check busy-while-open busy
    check again-while-closing again_while_closing
    check free-after-kill kill_owner
    check load-importer load_modules drm_kms_helper drm_shmem_helper vgem
    echo 8 >/proc/sys/vm/nr_hugepages
    check memory-rules memory_rules /dev/dri/card0
    check card-must-be-named says "no card was named" ucx-gaudi check-card
    check check-card ucx-gaudi check-card --card 0 --trace /tmp/trace
    stty -F /dev/ttyS2 raw && cat /tmp/trace >/dev/ttyS2
    check doctor ucx-gaudi doctor --card 0
}

pingpong() {
    ucx_perftest -t $1 -m $2 -n 20 -w 2 -s $3 >/tmp/server 2>&1 &
    server=$!
    sleep 1
    ucx_perftest localhost -t $1 -m $2 -n 20 -w 2 -s $3
    status=$?
    [ $status = 0 ] || kill $server
    wait
    cat /tmp/server
    return $status
}

set_ucx() {
    check ucx_info sh -c 'ucx_info -d | tee /dev/stderr | grep gaudi_copy'
    check loopback ucp-check loopback --ops tag,put,get --plain --sizes 0,1,7,4097,64K,1M+13
    check to-host ucp-check pair --one-way --mem gaudi:host --ops tag,put --plain --sizes 1,4097,1M+13
    check perftest-loopback ucx_perftest -t tag_lat -m gaudi -n 20 -w 2 -s 65536 -l
}

# A software RDMA device, which knows no dma-bufs: host memory goes through it, Gaudi memory is staged.
load_modules() { for module; do insmod /mod/$module.ko || return 1; done; }
load_rxe() {
    load_modules ib_core ib_uverbs udp_tunnel ip6_udp_tunnel crc32_generic rdma_rxe dummy || return 1
    ip address add 10.1.1.1/24 dev dummy0 && ip link set dummy0 up && rxe_link dummy0 && [ -e /dev/infiniband/uverbs0 ]
}
# NIXL's UCX: the other has no InfiniBand.
over_rxe() {
    LD_LIBRARY_PATH=/opt/thunk:/opt/nixl UCX_TLS=rc_verbs,ud_verbs,gaudi UCX_NET_DEVICES=rxe0:1 \
        UCX_UD_ETH_DGID_CHECK=n ucp-check --ucx /opt/nixl pair "$@"
}
# Where there is a Gaudi, UCX takes every RDMA device for one that registers its memory, if need be by address. The plugin
# knows better.
staged() {
    over_rxe "$@" >/tmp/staged 2>&1
    status=$?
    cat /tmp/staged
    [ $status -eq 0 ] && grep -q 'rxe0 cannot access Gaudi memory' /tmp/staged
}
set_rdma() {
    if [ ! -e /opt/nixl ]; then
        echo "skipped: set rdma: the machine that made this image has no rdma-core"
        return
    fi
    check load-rxe load_rxe
    check host over_rxe --mem host:host --ops tag,put,get --plain --sizes 1,4097,1M+13
    check staged staged --one-way --mem gaudi:host --ops tag,am,put --plain --sizes 1,4097,1M+13
    check doctor-names-the-kernel says CONFIG_PCI_P2PDMA ucx-gaudi doctor --card 0
    check check-card-names-the-hca says 'registers no dma-bufs' ucx-gaudi check-card --card 0
}

set_two_cards() {
    check second-card [ -c /dev/accel/accel1 ]
    check different-addresses different_addresses
    check pair ucp-check pair --mem gaudi:gaudi --ops tag,am,put,get --plain --sizes 1,4097,1M+13
    check relayed without_emulation --mem gaudi:gaudi,gaudi:host,host:gaudi --plain --sizes 1,4097,1M+13
    check perftest pingpong tag_bw gaudi 262144
}
# The driver cannot import: put and get are relayed, or fail.
without_emulation() {
    UCX_PROTO_EMULATION_ENABLE=n ucp-check pair --ops put,get "$@"
}
# The driver probes both at once, so either may be the first.
different_addresses() {
    for attribute in pci_addr module_id; do
        [ "$(cat $card/$attribute)" != "$(cat /sys/class/accel/accel1/device/$attribute)" ] || return 1
    done
}

# A process that copies all the time.
start_load() {
    ucx_perftest -t tag_bw -m gaudi -n 1000000 -s 65536 -l >/tmp/load 2>&1 &
    load=$!
    until ls -l /proc/$load/fd | grep -q 'accel/accel0$'; do
        [ -d /proc/$load/fd ] || { cat /tmp/load; return 1; }
        sleep 0.2
    done
    sleep 1
}
kill_under_load() {
    start_load && kill -9 $load || return 1
    wait $load
    opens_within_10_s
}
# The driver ends the processes that hold a card which it resets.
reset_under_load() {
    start_load && hard_reset || return 1
    sleep 2
    if grep -q '^State:.*[RSD] ' /proc/$load/status; then
        echo "the process still runs"
        kill -9 $load
        return 1
    fi
    wait $load
    echo "ended with $?"
    opens_within_10_s
}
set_reset() {
    check kill-under-load kill_under_load
    check loopback-after-kill ucp-check loopback --ops tag --plain --sizes 1,4097
    check hard-reset-under-load reset_under_load
    check loopback-afterwards ucp-check loopback --ops tag --plain --sizes 1,4097
}

# A program does something wrong: the driver says so, resets the card, and ends the program.
misused() {
    before=$(cat $card/hard_reset_cnt)
    timeout 50 misuse $1
    status=$?
    dmesg | tail -n 30
    [ $status = 137 ] || { echo "misuse ended with $status"; return 1; }
    dmesg | grep -q "$2" || { echo "nothing about: $2"; return 1; }
    for _ in $(seq 100); do
        [ "$(cat $card/hard_reset_cnt)" -gt "$before" ] && opens_within_10_s && return 0
        sleep 0.1
    done
    return 1
}
# The driver spares the card while the process lives, and resets it when that leaves a submission behind.
left_behind() { dmesg | grep -c 'device still in use .1 active CS'; }
edma_hangs() {
    before=$(left_behind)
    ucx-gaudi check-card --card 0 --may-reset --json && [ "$(left_behind)" -gt "$before" ]
}
set_faults() {
    check page-fault misused page-fault 'page fault on va 0xfff0001234567000'
    check no-packet misused opcode 'stream0. err cause: CP error due to undefined OPCODE'
    check foreign-register misused register 'PDMA_0-RAZWI SHARED RR LBW WR error.*0x1000007FFCC4B128'
    check hung-queue misused hang 'not finished in'
    check check-card-may-reset edma_hangs
}

check load load
check usable usable
if [ -n "$VM_SETS" ]; then
    for set in $(echo "$VM_SETS" | tr , ' '); do
        echo "VM-SET $set"
        set_$set
        check no-kernel-warnings no_warnings
        # The next set looks at its own messages only.
        forget_messages
    done
    echo VM-END
    sync
else
    echo "A shell inside the machine; poweroff -f ends it."
    setsid -c sh
fi
poweroff -f
