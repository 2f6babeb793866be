#!/usr/bin/env bash
# Without a GPU `--device cuda` ends with exit code 5, one line on stderr, and no output file.
set -euo pipefail
ehc=$1
cd "$(dirname "$0")/.."
out=$(mktemp -u)
code=0
text=$("$ehc" op engram.hash --in tests/golden/engram.hash.0.safetensors --out "$out" --device cuda 2>&1) || code=$?
[[ $code -eq 5 ]] || { echo "expected exit code 5, got $code: $text" >&2; exit 1; }
[[ $(wc -l <<<"$text") -eq 1 && $text == ehc:*cuda* ]] || { echo "expected one line about cuda, got: $text" >&2; exit 1; }
[[ ! -e $out ]] || { echo "a file was written" >&2; exit 1; }
