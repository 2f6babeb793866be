#!/usr/bin/env bash
# Formats every C++ and CUDA file with clang-format 14; --check only tells.
set -euo pipefail
cd "$(dirname "$0")/.."
format=$(command -v clang-format-14 || command -v clang-format)
files() { git ls-files -z '*.h' '*.cc' '*.c' '*.cu' '*.cuh'; }
if [[ ${1:-} == --check ]]; then
  files | xargs -0 "$format" --dry-run --Werror
else
  files | xargs -0 "$format" -i
fi
