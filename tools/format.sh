#!/usr/bin/env bash
# Formats every C++ and CUDA file with clang-format 14; --check only tells.
set -euo pipefail
cd "$(dirname "$0")/.."
format=$(command -v clang-format-14 || command -v clang-format)
files() {
  find benches bindings cli examples include src tests -type f '(' -name '*.h' -o -name '*.cc' -o -name '*.c' \
    -o -name '*.cu' -o -name '*.cuh' ')' -print0
}
if [[ ${1:-} == --check ]]; then
  files | xargs -0 "$format" --dry-run --Werror
else
  files | xargs -0 "$format" -i
fi
