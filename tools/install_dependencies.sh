#!/usr/bin/env bash
# Installs what is missing for a task: tools/install_dependencies.sh build|test|demo ...
# Debian 12 or newer, Ubuntu 24.04 or newer. Without root it prints the packages to ask for.
set -euo pipefail
cd "$(dirname "$0")/.."

build=(g++ cmake ninja-build ccache python3 python3-venv nlohmann-json3-dev libcli11-dev libfmt-dev
       libopenblas-dev libdlpack-dev libxxhash-dev pkg-config)
demo=(bible-kjv bible-kjv-text)
test=(libgtest-dev libgmock-dev librapidcheck-dev libicu-dev binutils clang-14 libclang-rt-14-dev
      clang-format-14 clang-tidy-14 g++-aarch64-linux-gnu)
# Ubuntu's browser is a snap: there the report is looked at only where a browser is installed.
grep -qs '^ID=ubuntu' /etc/os-release || test+=(chromium)

wanted=()
for task in "${@:-build}"; do
  case $task in
    build) wanted+=("${build[@]}") ;;
    test) wanted+=("${build[@]}" "${demo[@]}" "${test[@]}") ;;
    demo) wanted+=("${build[@]}" "${demo[@]}") ;;
    *) echo "install_dependencies.sh: expected build, test or demo, got '$task'" >&2; exit 2 ;;
  esac
done

command -v dpkg-query >/dev/null || {
  echo "This script knows Debian and Ubuntu. Elsewhere install the equivalents of:" >&2
  printf '  %s\n' "${wanted[*]}" >&2
  exit 1
}

missing=()
for package in "${wanted[@]}"; do
  [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
done
[[ ${#missing[@]} -eq 0 ]] && exit 0

if [[ $(id -u) -eq 0 ]]; then
  run=(env)
elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
  run=(sudo env)
else
  echo "These packages are missing and need root to install. Ask for:" >&2
  echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
  exit 1
fi
echo "Installing ${#missing[@]} packages: ${missing[*]}"
log=$(mktemp)
if ! { "${run[@]}" apt-get update -qq &&
       "${run[@]}" DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"; } >"$log" 2>&1; then
  tail -n 20 "$log" >&2
  echo "apt-get failed (above). Ask for: apt-get install --no-install-recommends ${missing[*]}" >&2
  rm -f "$log"
  exit 1
fi
rm -f "$log"
