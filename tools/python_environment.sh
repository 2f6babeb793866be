#!/usr/bin/env bash
# Makes .venv with the pinned packages of tools/requirements*.txt; quick when nothing changed.
set -euo pipefail
cd "$(dirname "$0")/.."
stamp=.venv/requirements.stamp
lists=(tools/requirements.txt tools/requirements-torch.txt)
cat "${lists[@]}" | cmp -s - "$stamp" && exit 0

# Is CUDA 13 in the loader's path, with everything that torch links and these lists leave out?
has_cuda_libraries() {
  local library known
  known=$(ldconfig -p 2>/dev/null || /sbin/ldconfig -p)
  for library in cudart.so.13 cublas.so.13 cufft.so.12 curand.so.10 cusolver.so.12 cusparse.so.12 cudnn.so.9 \
    nccl.so.2 cupti.so.13 nvrtc.so.13; do
    grep -q "lib$library" <<<"$known" || return 1
  done
}

rm -rf .venv
python3 -m venv .venv
.venv/bin/pip install -q --disable-pip-version-check uv==0.13.9
install=(.venv/bin/uv pip install -q --python .venv/bin/python)
"${install[@]}" -r "${lists[0]}"
if has_cuda_libraries; then
  "${install[@]}" --no-deps -r "${lists[1]}"
else
  "${install[@]}" "$(grep '^torch==' "${lists[1]}")"
fi
cat "${lists[@]}" >"$stamp"
