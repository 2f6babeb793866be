#!/usr/bin/env bash
# Installs the library, moves the tree elsewhere, and builds a user's project against it: by
# find_package and by pkg-config.   usage: run.sh BUILD_FOLDER CC CXX VERSION
set -euo pipefail
build=$1 cc=$2 cxx=$3 version=$4
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { echo "$*" >&2; exit 1; }

cmake --install "$build" --prefix "$work/first" >"$work/log" || fail "$(cat "$work/log")"
mv "$work/first" "$work/prefix"
library=$(find "$work/prefix" -name "libehc.so.$version")
[[ -n $library ]] || fail "no libehc.so.$version was installed"
soname=$(objdump -p "$library" | awk '$1 == "SONAME" {print $2}')
abi=${version%%.*}
[[ $abi != 0 ]] || abi=${version%.*}  # before 1.0 every minor version
[[ $soname == "libehc.so.$abi" ]] || fail "SONAME: expected libehc.so.$abi, got $soname"
libdir=$(dirname "$library")
[[ -e $libdir/$soname && -e $libdir/libehc.so ]] || fail "the links of libehc.so are missing"
if objdump -p "$library" | grep -E 'RPATH|RUNPATH'; then fail "an installed library with a path of the build"; fi
if find "$work/prefix" -name '*.a' | grep .; then fail "a static library was installed"; fi
if grep -rl "$(dirname "$(dirname "$here")")" "$work/prefix" --include='*.cmake' --include='*.pc' --include='*.h'; then
  fail "an installed file names the source folder"
fi

configure() { cmake -G Ninja -S "$here" -B "$work/$1" -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_C_COMPILER="$cc" \
  -DCMAKE_CXX_COMPILER="$cxx" -DWANTED_VERSION="$2" >"$work/log" 2>&1; }
configure cmake "$version" || fail "$(cat "$work/log")"
cmake --build "$work/cmake" >"$work/log" || fail "$(cat "$work/log")"
"$work/cmake/from_cpp"
"$work/cmake/from_c"
if configure newer 99.0; then fail "find_package(ehc 99.0) accepted version $version"; fi

export PKG_CONFIG_PATH=$libdir/pkgconfig LD_LIBRARY_PATH=$libdir
[[ $(pkg-config --modversion ehc) == "$version" ]] || fail "pkg-config: wrong version"
# shellcheck disable=SC2046  # flags are words
"$cxx" -std=c++20 "$here/from_cpp.cc" $(pkg-config --cflags --libs ehc) -o "$work/from_cpp"
# shellcheck disable=SC2046
"$cc" -std=c11 "$here/from_c.c" $(pkg-config --cflags --libs ehc) -o "$work/from_c"
"$work/from_cpp"
"$work/from_c"
