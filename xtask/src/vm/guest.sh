#!/bin/busybox sh
# First program of the virtual machine: loads the driver, runs the set of checks that VM_SET names (or a shell), and
# powers off. Results go to the first serial port, the kernel's messages to the second.
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
export UCX_PLUGIN_PATH=/opt/gaudi/plugins HOME=/tmp

milliseconds() { awk '{ printf "%d", $1 * 1000 }' /proc/uptime; }

# Runs a command as a check; its output is shown only when it fails.
check() {
    name=$1
    shift
    began=$(milliseconds)
    if "$@" >/tmp/output 2>&1; then verdict=ok; else verdict=failed; fi
    echo "VM-RESULT $verdict $name $(($(milliseconds) - began))"
    [ $verdict = ok ] || tail -n 40 /tmp/output
}

skip() { echo "VM-RESULT skipped $1 0"; echo "  $2"; }

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

hard_reset() {
    before=$(cat $card/hard_reset_cnt)
    echo 1 >$card/hard_reset
    attribute status Operational && [ "$(cat $card/hard_reset_cnt)" -gt "$before" ]
}

set_card() {
    check check-card ucx-gaudi check-card
    check doctor ucx-gaudi doctor
}

set_ucx() {
    check ucx_info sh -c 'ucx_info -d | grep gaudi_copy'
    check perftest ucx_perftest -t tag_bw -m gaudi -n 10 -s 65536 -l
    check ucp-check ucp-check
}

check load load
check usable usable
if [ -n "$VM_SET" ]; then
    set_$VM_SET
    check no-kernel-warnings no_warnings
    echo VM-END
    sync
else
    echo "A shell inside the machine; poweroff -f ends it."
    setsid cttyhack sh
fi
poweroff -f
