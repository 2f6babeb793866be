#!/usr/bin/env bash
# clang-tidy 14 over the library and the program; needs build/cpu. Also proves that clang parses
# every file. Arguments: files to look at (default: all).
set -euo pipefail
cd "$(dirname "$0")/.."
tidy=$(command -v clang-tidy-14 || command -v clang-tidy)
if [[ $# -gt 0 ]]; then files=("$@"); else mapfile -t files < <(git ls-files 'src/*.cc' 'cli/*.cc'); fi
printf '%s\0' "${files[@]}" | xargs -0 -n 4 -P "$(nproc)" "$tidy" -p build/cpu --quiet
