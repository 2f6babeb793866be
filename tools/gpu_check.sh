#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, from a build made elsewhere.
#   cmake --preset gpu && cmake --build --preset gpu --target ehc_program ehc_cuda_tests
#   tools/gpu_check.sh pack build/gpu DIR   the programs, stripped, with the libraries that they need and
#                                           this script, into DIR. The preset has no OpenBLAS (36 MB) and
#                                           no SIMD kernels, so that DIR stays below 45 MiB.
#   DIR/gpu_check.sh all OUT                on the GPU machine: every part, its record into the folder OUT
#   DIR/gpu_check.sh PART OUT               one part, each ended after 8 minutes:
#     tests      what `ehc check` cannot ask: streams, graphs, workspace, fused against its parts
#     check      every CUDA implementation against the reference, a process per processor
#     large      the cases of level 2: many tokens, beyond 2^31 elements, in four processes
#     sanitize   the four tools of compute-sanitizer over small cases of every operator that run each
#                family of its kernels, in three processes each; REFUSED where a tool does not run
#     first      what the first call of each operator costs in a process
#     bench      times, rates and shares of the ceilings of the same run
# Every part leaves OUT/PART.txt and OUT/PART.part.json; `tools/gpu_record.py OUT` makes of them
# record.json and record.md, `tools/gpu_record.py --page OUT/record.json` docs/benchmarks.md.
# More options of `ehc check` and `ehc bench` come from EHC_CHECK and EHC_BENCH, names of operators behind
# a part limit it to these.
set -euo pipefail

kParts=(tests check large sanitize first bench)
kSeconds=480
kMostKiB=$((45 * 1024))

pack() {
  local build=$1 to=$2 program
  mkdir -p "$to/lib" "$to/cases" "$to/golden"
  for program in ehc ehc_cuda_tests; do
    strip -o "$to/$program" "$build/bin/$program"
    # The C and C++ runtimes are there anyway.
    ldd "$build/bin/$program" | awk '$2 == "=>" && $1 !~ /^lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so/ {print $1, $3}' |
      while read -r name path; do strip -o "$to/lib/$name" "$path"; done
  done
  cp benches/cuda/*.txt "$to/cases"
  cp benches/cuda/peers.json tests/backends/cuda/sanitize.txt tools/gpu_check.sh tools/gpu_record.py "$to"
  cp tests/golden/*.safetensors "$to/golden"
  git describe --always --dirty --abbrev=12 >"$to/commit"
  local op
  while read -r op; do
    grep -qE "^(pairwise )?$op " "$to/sanitize.txt" || { echo "gpu_check: sanitize.txt: expected a case of $op" >&2; return 1; }
  done < <(operators_on_cuda "$build/bin/ehc")
  local size
  size=$(du -sk "$to" | cut -f1)
  echo "$to: $size KiB"
  ((size <= kMostKiB)) || { echo "gpu_check: expected at most $kMostKiB KiB in $to, got $size" >&2; return 1; }
}

# Runs a command; what it says goes to the screen and into the part's record.
run() {
  local code=0
  printf '$ %s\n' "$*" | tee -a "$out/$part.txt"
  timeout --signal=INT --kill-after=10 "$((kSeconds - (SECONDS - started)))" "$@" 2>&1 | tee -a "$out/$part.txt" || code=${PIPESTATUS[0]}
  if ((code == 124 || code == 137)); then echo "ended after $kSeconds seconds" | tee -a "$out/$part.txt"; fi
  ((code == 0)) || failed=1
  return 0
}

operators_on_cuda() {
  "$1" op --list --json |
    python3 -c 'import json, sys; print("\n".join(o["name"] for o in json.load(sys.stdin) if "cuda" in o["devices"]))'
}
# The names of the command line, or every `of`-th operator from the `first` on.
chosen() {
  if [[ ${#names[@]} -gt 0 ]]; then
    printf '%s\n' "${names[@]}"
  else
    operators_on_cuda "$here/ehc" | awk -v first="$1" -v of="$2" 'NR % of == first % of'
  fi
}

# Runs a command beside others, until `await_all`, on so many processors, which bound the threads of the reference.
beside() {
  local name=$1 processors=$2 chosen='' i
  shift 2
  for ((i = 0; i < processors; ++i, ++next_processor)); do
    chosen+=${chosen:+,}${allowed[next_processor % ${#allowed[@]}]}
  done
  printf '$ %s\n' "$*" >>"$out/$part.txt"
  {
    taskset -c "$chosen" timeout --signal=INT --kill-after=10 "$((kSeconds - (SECONDS - started)))" "$@" ||
      echo "$name of $part FAILED with exit code $?"
  } >"$out/$part.$name.log" 2>&1 &
}
# The record gets all that they said, the screen what is not well.
await_all() {
  wait
  cat "$out/$part".*.log >>"$out/$part.txt"
  grep -hvE '(^operator .*| ok| no cases| refused)$' "$out/$part".*.log || true
  rm -f "$out/$part".*.log
  ! grep -qE "^[a-z0-9.]+ of $part FAILED" "$out/$part.txt" || failed=1
}

# Most of the time is the reference's and the comparison's on the host.
check() {
  local workers=$1 i
  shift
  for ((i = 1; i <= workers; ++i)); do
    beside "$i" $(((${#allowed[@]} + workers - 1) / workers)) "$here/ehc" check --device cuda --slice "$i/$workers" \
      --json "$out/$part.$i.json" "$@" "${check_options[@]}" "${names[@]}"
  done
  await_all
}

sanitize() {
  local tool i list slices=3
  for tool in memcheck racecheck initcheck synccheck; do
    if ! compute-sanitizer --tool "$tool" "$here/ehc" info >"$out/probe.txt" 2>&1; then
      echo "compute-sanitizer $tool: REFUSED: $(tail -1 "$out/probe.txt")" | tee -a "$out/$part.txt"
      continue
    fi
    for ((i = 1; i <= slices; ++i)); do
      mapfile -t list < <(chosen "$i" "$slices")
      [[ ${#list[@]} -gt 0 ]] || continue
      beside "$tool.$i" 1 compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
        "$here/ehc" check --device cuda --cases "$here/sanitize.txt" --once \
        --json "$out/$part.$tool.$i.json" "${list[@]}"
      [[ ${#names[@]} -eq 0 ]] || break
    done
  done
  rm -f "$out/probe.txt"
  await_all
}

first() {
  local op
  while read -r op; do run "$here/ehc" bench --device cuda --first-call "$op"; done < <(chosen 0 1)
}

bench() {
  cat "$here"/cases/*.txt >"$out/bench.cases"
  run "$here/ehc" bench --device cuda --cases "$out/bench.cases" --json "$out/$part.json" \
    "${bench_options[@]}" "${names[@]}"
}

run_part() {
  part=$1
  failed=0
  started=$SECONDS
  next_processor=0
  rm -f "$out/$part".*
  : >"$out/$part.txt"
  case $part in
    tests) EHC_GOLDEN="$here/golden" run "$here/ehc_cuda_tests" --gtest_output="json:$out/$part.json" ;;
    check) check "${#allowed[@]}" ;;
    large) check 4 --level 2 --repeats 3 ;;
    sanitize) sanitize ;;
    first) first ;;
    bench) bench ;;
    *) echo "gpu_check: expected pack, all, ${kParts[*]}, got '$part'" >&2 && exit 2 ;;
  esac
  printf '{"part": "%s", "commit": "%s", "device": "%s", "driver": "%s", "seconds": %d, "failed": %d}\n' \
    "$part" "$(cat "$here/commit")" "$device" "$driver" $((SECONDS - started)) "$failed" >"$out/$part.part.json"
  echo "# $part: $([[ $failed -eq 0 ]] && echo ok || echo FAILED) after $((SECONDS - started)) s"
  ((failed == 0)) || any_failed=1
}

if [[ ${1:-} == pack ]]; then
  cd "$(dirname "$0")/.."
  pack "${2:?a build}" "${3:?a folder}"
  exit
fi

wanted=${1:?pack, all or a part}
out=${2:?a folder for the record}
shift 2
names=("$@")
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$out"
export LD_LIBRARY_PATH="$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
device=$("$here/ehc" info | sed -n 's/^cuda:0 *//p')
driver=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -1 || true)
read -ra check_options <<<"${EHC_CHECK:-}"
read -ra bench_options <<<"${EHC_BENCH:---intensity 2 --seconds 0.05}"
mapfile -t allowed < <(python3 -c 'import os; print(*sorted(os.sched_getaffinity(0)), sep="\n")')
any_failed=0
if [[ $wanted == all ]]; then
  for each in "${kParts[@]}"; do run_part "$each"; done
else
  run_part "$wanted"
fi
python3 "$here/gpu_record.py" "$out"
exit "$any_failed"
