#!/usr/bin/env bash
# Bytes of a build's device code: tools/cuda_sizes.sh BUILD. For each architecture the machine code and the
# debug lines of all kernels before compression (cuobjdump), and what lies in the library after it.
set -euo pipefail
build=$(realpath "$1")
command -v cuobjdump >/dev/null || { echo "cuda_sizes: no cuobjdump on PATH (CUDA toolkit, package cuda-cuobjdump)" >&2; exit 1; }
library=$(ls "$build"/lib/libehc.so.*.*.* 2>/dev/null | head -1)
[[ -n $library ]] || { echo "cuda_sizes: expected libehc.so in $build/lib; build the target ehc" >&2; exit 1; }
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
(cd "$scratch" && cuobjdump -xelf all -xptx all "$library" >/dev/null)
printf '%-10s %8s %14s %14s\n' "" files "machine code" "with lines"
for architecture in $(ls "$scratch" | sed -n 's/.*\.\(sm_[0-9a-z]*\)\.\(cubin\|ptx\)$/\1.\2/p' | sort -u -V); do
  files=("$scratch"/*."$architecture")
  code=$([[ $architecture == *.ptx ]] || size -A "${files[@]}" | awk '$1 ~ /^\.(text|nv\.constant|nv\.info|nv\.shared)/ {sum += $2} END {print sum}')
  printf '%-10s %8d %14s %14d\n' "$architecture" ${#files[@]} "${code:--}" "$(cat "${files[@]}" | wc -c)"
done
strip -o "$scratch/library" "$library"
printf 'in the library, compressed: %d bytes; the library, stripped: %d bytes\n' \
  "$(size -A "$library" | awk '$1 == ".nv_fatbin" {print $2}')" "$(stat -c %s "$scratch/library")"
