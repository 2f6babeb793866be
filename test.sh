#!/usr/bin/env bash
# Builds and tests everything: ./test.sh [--strict] [--quick] [STAGE ...]
#   --strict  warnings are errors (what CI does)
#   --quick   only the stages cpu, python and check
# Stages: cpu python check asan fuzz tsan tidy cuda aarch64. A second run is quick.
set -euo pipefail
cd "$(dirname "$0")"

werror=OFF
stages=()
quick=0
for argument in "$@"; do
  case $argument in
    --strict) werror=ON ;;
    --quick) quick=1 ;;
    -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 0 ;;
    cpu | python | check | asan | fuzz | tsan | tidy | cuda | aarch64) stages+=("$argument") ;;
    *) echo "test.sh: expected an option or a stage (see --help), got '$argument'" >&2; exit 2 ;;
  esac
done
if [[ ${#stages[@]} -eq 0 ]]; then
  stages=(cpu python check)
  [[ $quick -eq 1 ]] || stages+=(asan fuzz tsan tidy cuda aarch64)
fi

jobs=$(nproc)
summary=()
options=()  # of the configuration, besides
build() {  # preset, targets...
  local preset=$1
  shift
  cmake --preset "$preset" -DEHC_WERROR=$werror "${options[@]}" >"build/$preset.configure.log" 2>&1 || {
    cat "build/$preset.configure.log"
    return 1
  }
  cmake --build "build/$preset" -j "$jobs" --target "$@"
}

stage_cpu() {
  options=(-DEHC_PYTHON=OFF)  # tvm-ffi may not be there yet
  build cpu all
  ctest --test-dir build/cpu -j "$jobs" --output-on-failure --no-tests=error
}
stage_python() {
  tools/python_environment.sh
  options=(-DEHC_PYTHON=ON "-DPython_EXECUTABLE=$PWD/.venv/bin/python")
  build cpu ehc_python ehc_program
  EHC_BUILD=build/cpu .venv/bin/python -m pytest -q -n "$jobs" tests/python
  EHC_WERROR=$werror tools/wheel_test.sh
}
stage_check() { build/cpu/bin/ehc check; }
stage_asan() {  # clang, so that one build serves the fuzz targets too
  build asan ehc_tests
  export ASAN_OPTIONS=allocator_may_return_null=1 GTEST_TOTAL_SHARDS=$jobs
  seq 0 $((jobs - 1)) | xargs -P "$jobs" -I{} env GTEST_SHARD_INDEX={} build/asan/bin/ehc_tests --gtest_brief=1
}
stage_tsan() {
  # What runs on several threads; the rest costs minutes here and shows nothing. The build has the
  # files with such names alone (tests/CMakeLists.txt), and no OpenBLAS: TSan cannot see how its own
  # threads meet.
  local filter='ThreadPool.*:Parallel*.*:Context.*:CApi.*:*Threads*'
  build tsan ehc_tests
  build/tsan/bin/ehc_tests --gtest_brief=1 --gtest_filter="$filter"
}
fuzz_one() {  # program
  local name corpus
  name=$(basename "$1")
  corpus=(build/asan/corpus/"$name")  # what it found lies here
  mkdir -p "${corpus[0]}"
  [[ $name != safetensors_fuzz ]] || corpus+=(tests/golden)  # where it starts from
  "$1" -max_total_time="${EHC_FUZZ_SECONDS:-10}" -timeout=10 -rss_limit_mb=4096 \
    -artifact_prefix="build/asan/$name-" -print_final_stats=0 -verbosity=0 "${corpus[@]}"
}
stage_fuzz() {
  build asan ehc_fuzz
  export -f fuzz_one
  printf '%s\0' build/asan/bin/*_fuzz | xargs -0 -n 1 -P "$jobs" bash -c 'fuzz_one "$1"' --
}
stage_tidy() { tools/tidy.sh; }
stage_cuda() {
  command -v nvcc >/dev/null || { echo "no nvcc on PATH: CUDA objects are not compiled, skipped"; return 0; }
  build cuda ehc ehc_program ehc_cuda_tests
  build/cuda/bin/ehc_cuda_tests --gtest_brief=1  # says how many it skips where there is no GPU
  if nvidia-smi >/dev/null 2>&1; then
    build/cuda/bin/ehc check --device cuda
  else
    # Without a GPU the device must be refused with a clear error, and nothing written.
    tests/no_gpu_test.sh build/cpu/bin/ehc
    tests/no_gpu_test.sh build/cuda/bin/ehc
  fi
}
stage_aarch64() {
  command -v aarch64-linux-gnu-g++ >/dev/null || { echo "no aarch64 compiler: skipped"; return 0; }
  tools/check_aarch64.sh
}

tools/install_dependencies.sh test
mkdir -p build
started=$SECONDS
for stage in "${stages[@]}"; do
  printf '\n=== %s\n' "$stage"
  begin=$SECONDS
  set +e  # in a condition, `set -e` would be off inside the stage
  (set -e; "stage_$stage")
  code=$?
  set -e
  [[ $code -eq 0 ]] || { echo "test.sh: stage '$stage' failed" >&2; exit 1; }
  summary+=("$(printf '%-8s ok  %4d s' "$stage" $((SECONDS - begin)))")
done
printf '\n=== all stages passed in %d s\n' $((SECONDS - started))
printf '%s\n' "${summary[@]}"
