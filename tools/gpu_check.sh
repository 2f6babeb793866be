#!/usr/bin/env bash
# Checks and measures the CUDA backend on a machine with a GPU, from a build made elsewhere.
#   cmake --preset gpu && cmake --build --preset gpu --target ehc_program ehc_cuda_tests
#   tools/gpu_check.sh pack build/gpu DIR   the programs, stripped, with the libraries that they need and
#                                           this script, into DIR. The preset has no OpenBLAS (36 MB) and
#                                           no SIMD kernels, so that DIR stays below 45 MiB.
#   DIR/gpu_check.sh all OUT                on the GPU machine: every part, its record into the folder OUT
#   DIR/gpu_check.sh PART OUT               one part, each under 8 minutes, ended after 8:
#     tests      what `ehc check` cannot ask: streams, graphs, workspace, fused against its parts
#     check      every CUDA implementation against the reference, in four processes side by side
#     large      the cases of level 2: many tokens, beyond 2^31 elements
#     sanitize   compute-sanitizer over a few cases of every operator; REFUSED where it does not run
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
  cp benches/cuda/peers.json tools/gpu_check.sh tools/gpu_record.py "$to"
  cp tests/golden/*.safetensors "$to/golden"
  git describe --always --dirty --abbrev=12 >"$to/commit"
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
  "$here/ehc" op --list --json |
    python3 -c 'import json, sys; print("\n".join(o["name"] for o in json.load(sys.stdin) if "cuda" in o["devices"]))'
}
# The names of the command line, or every `of`-th operator from the `first` on.
chosen() {
  if [[ ${#names[@]} -gt 0 ]]; then
    printf '%s\n' "${names[@]}"
  else
    operators_on_cuda | awk -v first="$1" -v of="$2" 'NR % of == first % of'
  fi
}

# Most of its time is the reference's and the comparison's on the host.
check() {
  local workers=4 i list
  printf '$ ehc check --device cuda %s\n' "${check_options[*]} ${names[*]}" | tee -a "$out/$part.txt"
  for ((i = 1; i <= workers; ++i)); do
    mapfile -t list < <(chosen "$i" "$workers")
    [[ ${#list[@]} -gt 0 ]] || continue
    {
      timeout --signal=INT --kill-after=10 "$kSeconds" "$here/ehc" check --device cuda --json "$out/check.$i.json" \
        "${check_options[@]}" "${list[@]}" || echo "a check of $part FAILED with exit code $?"
    } >"$out/check.$i.log" 2>&1 &
    [[ ${#names[@]} -eq 0 ]] || break
  done
  wait
  cat "$out"/check.*.log | tee -a "$out/$part.txt"
  rm -f "$out"/check.*.log
  ! grep -q '^a check of .* FAILED' "$out/$part.txt" || failed=1
}

sanitize() {
  local tool list
  mapfile -t list < <(chosen 0 1)
  for tool in memcheck racecheck initcheck synccheck; do
    if ! compute-sanitizer --tool "$tool" "$here/ehc" info >"$out/probe.txt" 2>&1; then
      echo "compute-sanitizer $tool: REFUSED: $(tail -1 "$out/probe.txt")" | tee -a "$out/$part.txt"
      continue
    fi
    run compute-sanitizer --tool "$tool" --error-exitcode 9 --print-limit 20 \
      "$here/ehc" check --device cuda --most 12 --repeats 1 "${list[@]}"
  done
  rm -f "$out/probe.txt"
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
  : >"$out/$part.txt"
  case $part in
    tests) EHC_GOLDEN="$here/golden" run "$here/ehc_cuda_tests" --gtest_output="json:$out/$part.json" ;;
    check) check ;;
    large) run "$here/ehc" check --device cuda --level 2 --repeats 3 --json "$out/$part.json" "${check_options[@]}" "${names[@]}" ;;
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
any_failed=0
if [[ $wanted == all ]]; then
  for each in "${kParts[@]}"; do run_part "$each"; done
else
  run_part "$wanted"
fi
python3 "$here/gpu_record.py" "$out"
exit "$any_failed"
