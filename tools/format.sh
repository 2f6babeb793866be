#!/usr/bin/env bash
# Formats every C++ and CUDA file with clang-format 14; --check only tells.
set -euo pipefail
cd "$(dirname "$0")/.."
format=$(command -v clang-format-14 || command -v clang-format)
files() {  # also those that are not added yet; not those that are gone
  git ls-files -z --cached --others --exclude-standard '*.h' '*.cc' '*.c' '*.cu' '*.cuh' |
    while IFS= read -r -d '' file; do if [[ -f $file ]]; then printf '%s\0' "$file"; fi; done
}
if [[ ${1:-} == --check ]]; then
  files | xargs -0 "$format" --dry-run --Werror
else
  files | xargs -0 "$format" -i
fi
