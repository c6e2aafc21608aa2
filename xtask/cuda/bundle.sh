#!/usr/bin/env bash
# Packs what `measure.sh` needs into target/device/bundle.tgz: our release build, and of both stock UCXes the
# libraries that it loads. For a machine with an NVIDIA GPU and neither toolchain nor network (docs/cuda.md).
set -euo pipefail
cd "$(dirname "$0")/../.."
target=${CARGO_TARGET_DIR:-target}
cargo xtask setup
cargo xtask build
out=$target/device stage=$target/device/stage
rm -rf "$out" && mkdir -p "$stage/stock"/{ucx/libucx/lib/ucx,ucx/libucx_cu12.libs,nixl/nixl_cu12.libs/ucx}
cp -a "$target/dist" "$stage/dist"
cp "$target/debug/xtask" "$stage/xtask"
ucx=$target/stock/ucx/libucx/lib libs=$target/stock/ucx/libucx_cu12.libs nixl=$target/stock/nixl/nixl_cu12.libs
cp -a "$ucx"/lib{ucp,uct,ucs,ucm}.so* "$stage/stock/ucx/libucx/lib/"
cp -a "$ucx"/ucx/lib{uct_cma,uct_cuda,ucm_cuda}.so* "$stage/stock/ucx/libucx/lib/ucx/"
cp -a "$libs"/* "$stage/stock/ucx/libucx_cu12.libs/"
cp -a "$nixl"/lib{ucp,uct,ucs,ucm,ibverbs,mlx5,nl,numa}* "$stage/stock/nixl/nixl_cu12.libs/"
cp -a "$nixl"/ucx/lib{uct_cma,uct_cuda,ucm_cuda,uct_ib}.so* "$stage/stock/nixl/nixl_cu12.libs/ucx/"
# NIXL's libucm_cuda needs a CUDA 12 runtime, which its users have from another package.
cp "$libs"/libcudart-*.so.12* "$stage/stock/nixl/nixl_cu12.libs/libcudart.so.12"
find "$stage/dist" "$stage/xtask" -type f \( -name '*.so*' -o -perm -100 \) -exec strip --strip-unneeded {} +
tar -C "$stage" -czf "$out/bundle.tgz" .
rm -rf "$stage"
ls -l "$out/bundle.tgz"
