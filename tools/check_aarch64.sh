#!/usr/bin/env bash
# Compiles libehc.so for aarch64 (the generic path) with the cross-compiler; nothing is run.
# usage: tools/check_aarch64.sh [BUILD_FOLDER]
set -euo pipefail
cd "$(dirname "$0")/.."
build=${1:-build/aarch64}
if ! command -v aarch64-linux-gnu-g++ >/dev/null; then
  echo "aarch64-linux-gnu-g++ not found; install g++-aarch64-linux-gnu" >&2
  exit 1
fi
cmake -G Ninja -S . -B "$build" --toolchain cmake/aarch64.cmake -DCMAKE_BUILD_TYPE=Debug \
  -DEHC_DEVELOPER=OFF -DEHC_WERROR=ON -DEHC_CUDA=OFF -DEHC_BLAS=OFF >/dev/null
cmake --build "$build" --target ehc
library=$(readlink -f "$build/lib/libehc.so")
machine=$(readelf -h "$library" | awk '/Machine:/ {print $2}')
[[ $machine == AArch64 ]] || { echo "$library: expected AArch64, got $machine" >&2; exit 1; }
echo "$library: AArch64, $(stat -c %s "$library") bytes"
