#!/usr/bin/env bash
# clang-tidy 14 over every C++ file (or those named): checks of .clang-tidy, and the warnings of
# clang itself, so this also shows that clang compiles everything.
set -euo pipefail
cd "$(dirname "$0")/.."
tidy=$(command -v clang-tidy-14 || command -v clang-tidy)
mkdir -p build
cmake --preset tidy >build/tidy.configure.log 2>&1 || { cat build/tidy.configure.log >&2; exit 1; }
if [[ $# -gt 0 ]]; then
  files=("$@")
else
  mapfile -t files < <(sed -n "s|^ *\"file\": \"$PWD/\(.*\.cc\)\",\?$|\1|p" build/tidy/compile_commands.json |
    grep -v '^build/' | sort -u)
fi
[[ ${#files[@]} -gt 0 ]] || { echo "tidy.sh: no files in build/tidy/compile_commands.json" >&2; exit 1; }
# What it says besides findings is counts of what it left out in system headers.
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" "$tidy" -p build/tidy --quiet 2> >(grep -v 'warnings\? generated' >&2)
echo "clang-tidy: ${#files[@]} files, no finding"
