#!/usr/bin/env bash
# Builds the wheel, installs it into a bare environment (NumPy and tvm-ffi alone) and runs the package's NumPy
# tests there: tools/wheel_test.sh [FOLDER], default build/wheel. Without CUDA, for speed; `pip install .` has it
# where nvcc is on PATH.
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(realpath -m "${1:-build/wheel}")
python=$PWD/.venv/bin/python
rm -rf "$folder/dist" "$folder/venv" "$folder/tests"
mkdir -p "$folder"

# As deep as the other build folders, with their compiler and options, so that ccache has the objects.
"$python" -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation --wheel-dir "$folder/dist" \
  -C build-dir="$folder" -C cmake.define.EHC_CUDA=OFF -C cmake.define.EHC_BLAS=AUTO \
  -C cmake.define.EHC_WERROR="${EHC_WERROR:-OFF}" \
  -C cmake.define.CMAKE_C_COMPILER="$(command -v cc)" -C cmake.define.CMAKE_CXX_COMPILER="$(command -v c++)" \
  -C cmake.define.Python_EXECUTABLE="$python" .
wheels=("$folder"/dist/*.whl)
[[ ${#wheels[@]} -eq 1 && ${wheels[0]} == */engramhc-*-py3-none-linux_*.whl ]] ||
  { echo "wheel_test.sh: expected one py3-none wheel, got: ${wheels[*]}" >&2; exit 1; }

uv=("$(dirname "$python")/uv")
"${uv[@]}" venv -q --python "$python" "$folder/venv"
"${uv[@]}" pip install -q --python "$folder/venv/bin/python" "${wheels[0]}" \
  "numpy==$("$python" -c 'import numpy; print(numpy.__version__)')" \
  "apache-tvm-ffi==$("$python" -c 'import tvm_ffi; print(tvm_ffi.__version__)')" -r <(grep -E '^(pytest|pytest-xdist|ml_dtypes)==' tools/requirements.txt)

# The tests apart from the checkout, in which tests/python/torch would pass for torch.
mkdir -p "$folder/tests"
cp tests/python/*.py "$folder/tests"
cd "$folder"
venv/bin/python -m engramhc info
ENGRAMHC_INSTALLED=1 venv/bin/python -m pytest -q -n "$(nproc)" -p no:cacheprovider tests/test_ops_*.py
