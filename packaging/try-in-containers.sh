#!/bin/bash
# Builds the image of examples/containers/Containerfile and runs pairs of containers on software cards: which ways between two
# containers work, with which namespaces in common and under which restrictions. Prints the tables of docs/results/containers.md.
#
#   cargo xtask package deb && packaging/try-in-containers.sh target/package [ROW]
#
# As root: containers of root; as an ordinary user (with /etc/subuid): rootless ones. Needs podman and the network, and mmdebstrap for the
# base image, which comes from Debian's packages, so that no registry is needed. BASE names an image of yours instead, RUNTIME another
# than runc, SUITE another Debian; ROW is a pattern of bash. What it makes is removed at the end. It fails if a row is not as expected.
set -euo pipefail
packages=$(realpath "${1:?the folder with the packages}") only=${2:-*}
here=$(realpath "$(dirname "$0")/../examples/containers")
runtime=${RUNTIME:-runc}
for tool in podman "$runtime" ${BASE:-mmdebstrap}; do
    [ "$tool" = "${BASE:-}" ] || command -v "$tool" > /dev/null || { echo "skipped: no $tool (apt install $tool)"; exit 0; }
done
# podman's bridge needs it, and says only that there is no such file.
[ "$(id -u)" != 0 ] || command -v iptables > /dev/null || { echo "skipped: no iptables (apt install iptables)"; exit 0; }
work=$(mktemp -d) name=ucx-gaudi-try-$$ failed=0
chmod 755 "$work"
pod() { podman --runtime "$runtime" "$@"; }
end() {
    pod rm --force --time 0 "$name" > /dev/null 2>&1 || true
    pod rmi --force "$name:1.22.0" "$name:1.21.0" "$name:base" > /dev/null 2>&1 || true
    podman unshare rm -rf "$work" 2> /dev/null || rm -rf "$work"
}
trap end EXIT

base=${BASE:-localhost/$name:base}
if [ -z "${BASE:-}" ]; then
    mmdebstrap --quiet --variant=minbase --include=ca-certificates "${SUITE:-bookworm}" "$work/base.tar"
    pod import --quiet "$work/base.tar" "$base" > /dev/null
fi
for ucx in 1.22.0 1.21.0; do
    # pip has its UCX from PyPI. A proxy may have certificates of its own.
    pod build --quiet --layers=false --isolation chroot --network host -v /etc/ssl/certs:/etc/ssl/certs:ro \
        --env PIP_CERT=/etc/ssl/certs/ca-certificates.crt --build-arg BASE="$base" --build-arg UCX="$ucx" \
        -t "localhost/$name:$ucx" -f "$here/Containerfile" "$packages" > "$work/build" 2>&1 || { cat "$work/build"; exit 1; }
done

# Two containers. They have software cards in common (a folder, in the place of the kernel's driver) and a socket at which they meet;
# all else is up to their options. Emulation is off, so that put and get fail where gaudi_ipc does not carry them. The programs have
# different pids, as they usually do: UCX mistakes an equal one for its peer's.
pair() { # WAY OPTIONS-OF-ONE OPTIONS-OF-THE-OTHER
    local way=$1 soft=2 ops=put,get mem=gaudi:gaudi settings=UCX_PROTO_EMULATION_ENABLE=n tls=${tls:-all} options process pids=() codes=()
    # shellcheck disable=SC2016 # for the shell inside
    local start='n=0; while [ $n -lt $0 ]; do n=$((n + 1)); /bin/true; done; exec "$@"'
    case $way in
        import) soft=2,import ;;
        staged) ops=tag,put,get mem=gaudi:gaudi,host:gaudi settings=UCX_PROTO_EMULATION_ENABLE=y tls=${tls/all/^},gaudi_ipc tls=${tls/^,/^} ;;
    esac
    podman unshare rm -rf "$work/meet" "$work/cards" 2> /dev/null || rm -rf "$work/meet" "$work/cards"
    mkdir -m 1777 "$work/meet"; mkdir -m 700 "$work/cards"
    for options in "$2" "$3"; do
        # shellcheck disable=SC2086 # options are words
        timeout 90 podman --runtime "$runtime" run --rm --ulimit nofile=4096 --ulimit nproc=4096 --umask 0 -v "$work/meet:/meet" \
            -e $settings -e UCX_TLS=$tls -e UCX_LOG_LEVEL=info $options sh -c "$start" ${#pids[@]}0 ucx-gaudi run -q --soft=$soft -- \
            ucp-check pair --meet /meet/socket --timeout 20 --ops $ops --mem $mem --sizes 8,4097,2M > "$work/said.${#pids[@]}" 2>&1 &
        pids+=($!)
    done
    for process in "${pids[@]}"; do wait "$process" && codes+=(0) || codes+=($?); done
    [ "${codes[*]}" = "0 0" ] || return 1
    case $way in
        import) ! grep -q 'imported 0\|relayed [1-9]' "$work"/said.* ;;
        relay) ! grep -q 'imported [1-9]\|relayed 0' "$work"/said.* ;;
        staged) ! grep -q 'imported [1-9]\|relayed [1-9]' "$work"/said.* ;;
    esac
}

# Why not: the plugin's reason, or else the first error.
reason() {
    local line
    for line in 'not reachable: .*' 'UCX  DIAG .*start time.*' 'UCX  ERROR.*' 'FAIL .*' 'ucp-check: .*' '[eE]rror:.*' 'process .: gaudi_ipc .*'; do
        grep -ho "$line" "$work"/said.* | head -n 1 | grep . && return
    done
}

# Prints a row and the reasons below the table.
row() { # NAME EXPECTED OPTIONS [OPTIONS-OF-THE-OTHER]; EXPECTED: of import, relay, staged, y or n
    # shellcheck disable=SC2254 # a pattern
    case $1 in $only) ;; *) return 0 ;; esac
    local way found='' cells=''
    for way in import relay staged; do
        if pair $way "$3" "${4:-$3}"; then found+=y cells+=' yes |'; else
            found+=n cells+=' no |'
            printf '%s, %s: %s\n' "$1" $way "$(reason)" >> "$work/reasons"
        fi
    done
    echo "| $1 |$cells"
    [ $found = "$2" ] || { failed=1; echo "expected $2, got $found: $1" >&2; grep -v INFO "$work"/said.* | tail -n 8 >&2; }
}

image=localhost/$name:1.22.0
cards="-v $work/cards:/dev/shm/soft-gaudi-0:U"
# Containers of a pod have the namespaces of this one.
pod run --detach --name "$name" --ipc shareable --ulimit nofile=4096 --ulimit nproc=4096 --entrypoint sleep "$image" infinity > /dev/null
net="--network container:$name" ipc="--ipc container:$name" pid="--pid container:$name"
locked="--read-only --cap-drop all --security-opt no-new-privileges"
mkdir -m 1777 "$work/shm"
shm="-v $work/shm:/dev/shm"
# Users outside, two ranges of them, and what reaches no other container: rootless ones have a network of their own.
if [ "$(id -u)" = 0 ]; then who=root one=200000 other=300000 alone=nny; else who=rootless one=1 other=10001 alone=nnn; fi
map() { echo "--uidmap 0:$1:2000 --gidmap 0:$1:2000"; }

echo "$(podman --version), $runtime, $who; $(uname -sr); in each container:"
pod run --rm $locked --ulimit nofile=4096 --ulimit nproc=4096 --entrypoint sh "$image" -c \
    'if command -v cc gcc; then exit 1; fi; echo "no compiler, $(grep Seccomp: /proc/self/status | tr "\t" " "), $(ucx_info -v | head -n 1)"'
# Without the entry point, by hand.
for preload in '' /usr/lib/ucx-gaudi/preload/libucx_gaudi_preload.so; do
    listed=$(pod run --rm --ulimit nofile=4096 --ulimit nproc=4096 --entrypoint ucx_info -e LD_PRELOAD="$preload" \
        -e LD_LIBRARY_PATH=/usr/lib/ucx-gaudi/soft/gaudi:/opt/ucx/libucx/lib "localhost/$name:1.21.0" -d |
        sed -n 's/.*Transport: \(gaudi.*\)/\1/p' | tr '\n' ' ')
    echo "UCX 1.21, LD_PRELOAD=$preload: ${listed:-no Gaudi}"
done
[ "$listed" = "gaudi_cpy gaudi_gdr gaudi_ipc " ] || failed=1
echo
echo "| in common, or restricted | import | relay | staged |"
echo "|---|---|---|---|"
row "nothing" $alone "$cards $image"
row "network" yyy "$net $cards $image"
row "ipc, pid" yyy "$ipc $pid $cards $image"
row "network, ipc, pid" yyy "$net $ipc $pid $cards $image"
row "network, ipc, pid of the host" yyy "--network host --ipc host --pid host $cards $image"
row "network, ipc" nnn "$net $ipc $cards $image"
tls=^sm row 'network, ipc; `UCX_TLS=^sm`' yyy "$net $ipc $cards $image"
row 'network; a volume at `/dev/shm`' yyy "$net $shm $cards $image"
row "network, ipc, pid; read-only root, no capability, no-new-privileges" yyy "$net $ipc $pid $locked $cards $image"
row 'the same without a writable `/tmp`' yyy "$net $ipc $pid $locked --read-only-tmpfs=false $cards $image"
row "network; read-only root, no capability, no-new-privileges" yyy "$net $locked $cards $image"
row "network, ipc, pid; uid 1000 inside" yyy "$net $ipc $pid -u 1000 ${cards/gaudi-0/gaudi-1000} $image"
row "network, ipc, pid; uids 1000 and 1001" nny "$net $ipc $pid -u 1000 $image" "$net $ipc $pid -u 1001 $image"
row "the host's network; two user namespaces, one uid outside" yyy "--network host $(map $one) $cards $image"
row "the host's network; two user namespaces, two uids outside" nny "--network host $(map $one) $image" "--network host $(map $other) $image"
row 'network, ipc, pid; UCX 1.21 (`LD_PRELOAD`)' yyy "$net $ipc $pid $cards localhost/$name:1.21.0"
row 'network, ipc, pid; `HABANA_VISIBLE_MODULES=2` and `=0`' yyy \
    "$net $ipc $pid -e HABANA_VISIBLE_MODULES=2 $cards $image" "$net $ipc $pid -e HABANA_VISIBLE_MODULES=0 $cards $image"
[ ! -f "$work/reasons" ] || { echo; sed "s/.*/* &/" "$work/reasons"; }
exit $failed
