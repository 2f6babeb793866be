#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, from a build made elsewhere.
#   tools/gpu_check.sh pack BUILD DIR   where it was built: the program, stripped, with the libraries
#                                       that it needs and this script, into DIR
#   DIR/gpu_check.sh PART OUT           on the GPU machine: a part, its record into the folder OUT
# Parts, each under 8 minutes: check (every CUDA implementation against the reference), sanitize
# bits (what CPU and CUDA must have in common), sanitize (compute-sanitizer over a few cases; REFUSED
# where the tool does not run), bench (JSON and Markdown).
# More options of `ehc check` and `ehc bench` come from EHC_CHECK and EHC_BENCH, and names of operators.
set -euo pipefail

pack() {
  local build=$1 to=$2
  mkdir -p "$to/lib"
  strip -o "$to/ehc" "$build/bin/ehc"
  # The C and C++ runtimes are there anyway.
  ldd "$build/bin/ehc" | awk '$2 == "=>" && $1 !~ /^lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so/ {print $1, $3}' |
    while read -r name path; do strip -o "$to/lib/$name" "$path"; done
  cp benches/cuda/*.txt "$to"
  cp tools/gpu_check.sh tools/gpu_bits.py "$to"
  mkdir -p "$to/golden"
  cp tests/golden/*.safetensors "$to/golden"
  git describe --always --dirty >"$to/commit"
  du -sh "$to"
}

# Runs a command of the program; its output goes to the screen and into a record.
record() {
  local name=$1
  shift
  set +e
  "$@" 2>&1 | tee "$out/$name.txt"
  local code=${PIPESTATUS[0]}
  set -e
  {
    printf '# %s\n\nCommit %s, %s\n\n    %s\n\nExit code %s\n\n```\n' "$name" "$(cat "$here/commit")" "$device" "$*" "$code"
    cat "$out/$name.txt"
    printf '```\n'
  } >"$out/$name.md"
  return "$code"
}

sanitize() {
  local failed=0 tool
  cat >"$out/sanitize.cases" <<'CASES'
engram.window T=200 max_ngram=3|5 pad_id=2 blocking=farther B=9 with=cu_seqlens
engram.hash T=67 L=2 Nmax=3 Kh=8
engram.gather_fwd T=31 Nmax=3 Kh=4 rows=50 hd=33|64 table=BF16
engram.gather_bwd T=300 Nmax=3 Kh=4 rows=50 hd=9|16 form=dense|sparse
engram.gather_bwd T=200 Nmax=3 Kh=4 rows=3 hd=16 index=same
engram.gather_dequant T=31 Nmax=3 Kh=4 rows=50 hd=64
engram.quantize_rows rows=9 hd=112 group=7|16
engram.momentum_update rows=31 hd=33 beta=0.95 nesterov=true
engram.optimizer_step rows=70 hd=64|600 lr=0.1 eps=1e-20
mhc.expand_fwd T=3 n=4 d=257 A=BF16
mhc.expand_bwd T=3 n=4 d=64 A=BF16
mhc.pre_apply_fwd T=3 n=4 d=257 A=F16
mhc.pre_apply_bwd T=3 n=4 d=5000 A=BF16 with=grad_residual_acc
mhc.post_fwd T=3 n=4 d=64 A=BF16 inplace=true
mhc.post_bwd T=3 n=3|4 d=2100 A=BF16
mhc.multilayer_recompute T=2 n=4 d=64 L=3 Lp=3 with=layer_output.L A=F32
mhc.pre_big_fuse T=5 n=4 d=257 A=BF16 norm_eps=1e-6 pre_eps=1e-6 post_mult=2 repeat=20 sinkhorn_eps=1e-6 S=2
mhc.split_bwd T=300 n=4 post_mult=2
mhc.head_mix_bwd T=300 n=4
CASES
  for tool in memcheck racecheck initcheck synccheck; do
    if ! compute-sanitizer --tool "$tool" "$here/ehc" info >"$out/probe.txt" 2>&1; then
      echo "compute-sanitizer $tool: REFUSED: $(tail -1 "$out/probe.txt")"
      continue
    fi
    record "sanitize-$tool" compute-sanitizer --tool "$tool" --error-exitcode 9 \
      "$here/ehc" check --device cuda --cases "$out/sanitize.cases" || failed=1
  done
  return "$failed"
}

if [[ ${1:-} == pack ]]; then
  cd "$(dirname "$0")/.."
  pack "$2" "$3"
  exit
fi

part=${1:?pack, check, bits, sanitize or bench}
out=${2:?a folder for the record}
shift 2
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
device=$("$here/ehc" info | sed -n 's/^cuda:0 *//p')
read -ra check_options <<<"${EHC_CHECK:-}"
read -ra bench_options <<<"${EHC_BENCH:-}"
case $part in
  check) record check "$here/ehc" check --device cuda "${check_options[@]}" "$@" ;;
  bits) record bits python3 "$here/gpu_bits.py" "$here/ehc" "$here/golden" ;;
  sanitize) sanitize ;;
  bench)
    cat "$here"/*.txt >"$out/bench.cases"
    record bench "$here/ehc" bench --device cuda --cases "$out/bench.cases" --json "$out/bench.json" \
      "${bench_options[@]}" "$@"
    ;;
  *) echo "gpu_check: expected pack, check, bits, sanitize or bench, got '$part'" >&2 && exit 2 ;;
esac
