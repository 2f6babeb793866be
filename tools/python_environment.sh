#!/usr/bin/env bash
# Makes .venv with the pinned packages of tools/requirements.txt; quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/requirements.stamp
if ! cmp -s tools/requirements.txt "$stamp" 2>/dev/null; then
  rm -rf .venv
  python3 -m venv .venv
  .venv/bin/pip install -q --disable-pip-version-check -r tools/requirements.txt
  cp tools/requirements.txt "$stamp"
fi
