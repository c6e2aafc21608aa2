#!/usr/bin/env bash
# Host, Gaudi and CUDA memory on a machine with an NVIDIA GPU: verifies every byte, measures the map, and tries the
# settings of UCX that might help mixed pairs. Runs from what `bundle.sh` packed; needs no toolchain.
#
#   measure.sh BUNDLE [STEP...]     steps: facts raw plain settings both verify pairs   (all, in this order)
#
# Results go to $OUT (default: ./out): a text file for each step, and pairs.json. The Gaudi is the software one. CUDA_FOLDER: where libcuda.so.1 is, if it is somewhere unusual. The exit
# status is 1 if a step failed, except those in which UCX is expected to hang.
set -uo pipefail
bundle=$(realpath "$1") && shift
steps=${*:-facts raw plain settings both verify pairs}
OUT=$(realpath -m "${OUT:-out}") && mkdir -p "$OUT"
root=$(mktemp -d) && trap 'rm -rf "$root"' EXIT
tar -C "$root" -xzf "$bundle"
lib=$root/dist/lib/ucx-gaudi
# The driver's folder, where the loader does not look there anyway.
cuda=${CUDA_FOLDER:-}
for folder in /usr/local/nvidia/lib64 /usr/local/nvidia/lib /usr/lib/wsl/lib; do
    [ -z "$cuda" ] && [ -e "$folder/libcuda.so.1" ] && cuda=$folder
done

# The libraries of a UCX, and the software Gaudi: loader UCX
loader() {
    case $1 in
        ucx) folders=$root/stock/ucx/libucx/lib:$root/stock/ucx/libucx_cu12.libs ;;
        nixl) folders=$root/stock/nixl/nixl_cu12.libs ;;
    esac
    echo "$lib/soft/gaudi:$folders${cuda:+:$cuda}"
}
# check UCX [K=V...] -- WORDS: our client, with the plugin
check() {
    local ucx=$1 && shift
    local settings=()
    while [ "$1" != -- ]; do settings+=("$1") && shift; done
    shift
    local node=cuda-$BASHPID
    # env sees the later of two values: settings may replace any of these.
    env LD_LIBRARY_PATH="$(loader "$ucx")" UCX_PLUGIN_PATH="$lib/plugins" SOFT_GAUDI_DEVICES=2 \
        SOFT_GAUDI_LENIENT=ordered,unpinned SOFT_GAUDI_NODE="$node" "${settings[@]}" \
        "$root/dist/bin/ucp-check" "$@" --ucx "$root/stock/$ucx"
    local code=$?
    rm -rf "/dev/shm/soft-gaudi-$(id -u)/$node"
    return $code
}
# step NAME FILE LIMIT COMMAND...: its output goes to a file, its outcome to standard output. The limit is in seconds.
# expected=CODE before it: that exit status is no failure (3: ucp-check saw a hang).
step() {
    local name=$1 file=$OUT/$2 limit=$3 start=$SECONDS && shift 3
    echo "### $name" >>"$file"
    export -f check loader settings_of try
    export root lib cuda OUT
    timeout "$limit" bash -c '"$@"' step "$@" >>"$file" 2>&1
    local code=$?
    local word=ok
    if [ $code != 0 ] && [ "${expected:-}" = $code ]; then
        word="failed as expected ($code)"
    elif [ $code != 0 ]; then
        word="FAILED ($code)"
        # A file, because some steps run in subshells.
        echo "$word: $name" >>"$root/failed"
    fi
    echo "$word: $name, $((SECONDS - start)) s"
}

facts() {
    uname -r && nproc && grep -m1 "model name" /proc/cpuinfo
    grep -E "MemTotal|Shmem|Huge" /proc/meminfo && df -h /dev/shm | tail -1
    nvidia-smi --query-gpu=name,driver_version,pcie.link.gen.current,pcie.link.width.current --format=csv
    ls -l /dev/udmabuf /dev/dma_heap /proc/sys/kernel/yama/ptrace_scope 2>&1
    echo "cuda: ${cuda:-where the loader looks}" && ldconfig -p | grep -E "libcuda.so|libnvidia-ml|libcudart"
    true
}

# What the copies cost without UCX: pinned and pageable memory by CUDA, the software card by libuct.
raw() {
    python3 - <<'PY'
import time, torch
for size in (512 << 10, 4 << 20, 64 << 20):
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    for pinned in (True, False):
        count = max(1, (64 << 20) // size)
        hosts = [torch.zeros(size, dtype=torch.uint8, pin_memory=pinned) for _ in range(count)]
        for name, copy in (("h2d", lambda h: device.copy_(h, non_blocking=True)),
                           ("d2h", lambda h: h.copy_(device, non_blocking=True))):
            best = 0
            for _ in range(5):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for host in hosts:
                    copy(host)
                torch.cuda.synchronize()
                best = max(best, size * count / (time.perf_counter() - start) / 1e9)
            print(f"cuda {name} {'pinned' if pinned else 'pageable'} {size >> 10} KiB: {best:.1f} GB/s")
PY
    check ucx -- costs copies --sizes 1M,16M
}

tuned="UCX_RMA_PPLN_ENABLE=y UCX_SYSV_SEG_SIZE=32832 UCX_POSIX_SEG_SIZE=32832"
host="UCX_RNDV_FRAG_MEM_TYPES=host" stock="UCX_CUDA_COPY_BW=10000MBs,h2d:8300MBs,d2h:11660MBs,d2d:320GBs"
export tuned host stock
# The settings by name. stock: UCX's own defaults. default: with ours. tuned: what `ucx-gaudi run --tuned` sets, and
# pipelined put and get. both: the same with host fragments.
# plain: without the plugin.
settings_of() {
    local link="10000MBs,h2d:45000MBs,d2h:45000MBs,d2d:320GBs"
    case $1 in
        default) ;;
        stock) echo "$stock" ;;
        tuned) echo "$tuned" ;;
        both) echo "$host $tuned" ;;
        plain) echo "UCX_MODULES=^gaudi" ;;
        plain-both) echo "UCX_MODULES=^gaudi $host $tuned" ;;
        link) echo "$tuned UCX_CUDA_COPY_BW=$link" ;;
        both-link) echo "$host $tuned UCX_CUDA_COPY_BW=$link" ;;
        frag-*) echo "$host $tuned UCX_RNDV_FRAG_SIZE=host:${1#frag-},cuda:4M" ;;
        count-*) echo "$host $tuned UCX_RNDV_FRAG_ALLOC_COUNT=host:${1#count-},cuda:128" ;;
        get-ppln) echo "$host $tuned UCX_RNDV_SCHEME=get_ppln" ;;
        put-ppln) echo "$host $tuned UCX_RNDV_SCHEME=put_ppln" ;;
        no-attach) echo "$host $tuned UCX_PROTOS=^rndv/rkey_ptr/mtype" ;;
        no-ipc) echo "$stock $tuned UCX_TLS=^cuda_ipc" ;;
        posix) echo "$host $tuned UCX_TLS=posix,cma,cuda_copy,gaudi_cpy" ;;
        no-cma) echo "$host $tuned UCX_TLS=^cma" ;;
    esac
}
# try SETTINGS PAIR OPS SIZES [WORDS]: a line for each operation: alone and with several outstanding, in GB/s.
try() {
    local name=$1 pair=$2 ops=$3 sizes=$4 code=0
    # shellcheck disable=SC2046
    check ucx $(settings_of "$name") -- pair --plain --mem "$pair" --ops "$ops" --sizes "$sizes" --iters 7 \
        --timeout 10 ${5:---one-way} >"$OUT/.try" 2>&1 || { code=$? && echo "$name $pair: $(grep -m3 -E 'FAIL|HUNG|ERROR' "$OUT/.try")"; }
    awk -v name="$name" '$NF == "verified" {
        key = $1 " " $2; if (!(key in line)) order[n++] = key
        line[key] = line[key] sprintf("  %s: %.1f/%.1f", $3 >= 1048576 ? $3 / 1048576 "M" : $3 / 1024 "K", $3 / $4 / 1e3, $5)
    } END { for (i = 0; i < n; i++) printf "%-10s %-18s%s\n", name, order[i], line[order[i]] }' "$OUT/.try"
    rm -f "$OUT/.try"
    return $code
}

has() { case " $steps " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

has facts && step "the machine" facts.txt 30 bash -c "$(declare -f facts); facts"
has raw && step "copies without UCX" facts.txt 60 bash -ec "$(declare -f raw); raw"
if has plain; then
    # What UCX does without the plugin: with CUDA in one of the two processes, and in both.
    for name in plain plain-both; do
        for pair in host:cuda cuda:host cuda:cuda; do
            step "$name $pair" plain.txt 20 try $name $pair tag,put,get 1M,16M
        done
        step "$name host:cuda, both processes with CUDA" plain.txt 20 try $name host:cuda tag,put,get 1M,16M " "
    done
    for name in stock default; do
        step "warnings, $name" plain.txt 20 check ucx $(settings_of $name) -- pair --plain --one-way --mem gaudi:cuda \
            --ops tag --sizes 1M
    done
fi
if has settings; then
    for pair in host:gaudi gaudi:host host:cuda cuda:host; do
        step "floor $pair" settings.txt 20 try both $pair tag,put,get 1M,4M,16M,64M
        step "floor $pair, default" settings.txt 20 try default $pair tag 1M,16M
    done
    for pair in gaudi:cuda cuda:gaudi; do
        for name in stock default tuned both link; do
            step "$name $pair" settings.txt 25 try $name $pair tag,am,put,get 1M,16M
        done
        step "both $pair, both processes with CUDA" settings.txt 25 try both $pair tag 1M,16M " "
        step "default $pair, both processes with CUDA" settings.txt 25 try default $pair tag 1M,16M " "
        for name in both both-link frag-128K frag-256K frag-1M frag-4M count-16 count-512 get-ppln put-ppln no-attach \
            no-ipc posix no-cma; do
            step "$name $pair" settings.txt 15 try $name $pair tag 1M,4M,16M,64M
        done
    done
fi
if has both; then
    tls="UCX_TLS=sysv,cma,cuda_copy,cuda_ipc,gaudi_cpy"
    for ucx in ucx nixl; do
        step "$ucx: transports and devices named" both.txt 40 check $ucx $tls UCX_ACC_DEVICES=cuda,gaudi_copy -- \
            pair --plain --cuda --sizes 1,4097,1M+1
        step "$ucx: one process" both.txt 40 check $ucx -- \
            loopback --plain --cuda --sizes 1,4097,65537,1M+1
        expected=3 step "$ucx: one process, fragments in CUDA memory (UCX hangs here)" both.txt 30 check $ucx $stock -- \
            loopback --plain --mem gaudi:cuda --ops tag --sizes 65537 --timeout 5
        step "$ucx: contexts come and go" both.txt 40 check $ucx -- \
            reconnect --fresh --count 10 --mem gaudi:cuda,cuda:gaudi,gaudi:gaudi,host:cuda
        step "$ucx: a process is killed" both.txt 60 check $ucx -- \
            peer-errors --plain --mem gaudi:cuda,cuda:gaudi --ops tag,put,get --sizes 16M --timeout 20
        step "$ucx: three threads" both.txt 30 check $ucx -- threads --plain --cuda --sizes 4097,1M+1
    done
    # By preload: the names of NIXL's libraries are mangled, so that no folder replaces its libibverbs. It fails: the
    # software HCA cannot map a dma-buf of CUDA memory.
    expected=1 step "nixl: soft-rdma beside CUDA (it cannot reach CUDA memory)" both.txt 60 check nixl LD_PRELOAD="$lib/soft/rdma/libibverbs.so.1" \
        SOFT_RDMA_DIR="$root/rdma" SOFT_RDMA_STATS="$OUT/rdma.json" SOFT_RDMA_MEMLOCK=off \
        SOFT_GAUDI_LENIENT=import,ordered,unpinned UCX_TLS=rc,cuda_copy,gaudi_cpy -- \
        pair --plain --cuda --sizes 1,4097,1M+1
    step "a dma-buf of CUDA" both.txt 20 check ucx SOFT_GAUDI_LENIENT=import -- cuda-dmabuf
fi
if has verify; then
    for ucx in ucx nixl; do
        step "verify $ucx, as it comes" "verify-$ucx.txt" 200 check $ucx -- pair --cuda &
    done
    wait
fi
if has pairs; then
    export UCX_GAUDI_TARGET_DIR=$root
    [ -n "$cuda" ] && export LD_LIBRARY_PATH=$cuda
    step "the map" pairs.txt 400 "$root/xtask" bench pairs --prebuilt --json "$OUT/pairs.json"
fi
cat "$OUT"/{plain,settings}.txt 2>/dev/null | grep -v '^###'
tail -n 3 "$OUT"/verify-*.txt 2>/dev/null
cat "$OUT/pairs.txt" 2>/dev/null
[ ! -e "$root/failed" ] || { cat "$root/failed" && exit 1; }
