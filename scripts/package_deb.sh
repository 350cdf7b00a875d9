#!/usr/bin/env bash
# Makes the Debian packages libmoe0.1, libmoe-dev and moe in build/deb, of a release build.
#
#   scripts/package_deb.sh      needs help2man
#
# Then checks them: by lintian, if it is installed; and builds and runs the first programs in C++
# and in C against their contents, unpacked into a folder, by CMake and by pkg-config. Changes
# nothing outside build/
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

command -v help2man >/dev/null || {
  echo "package_deb: help2man is not installed: the packages would have no manual pages" >&2
  exit 2
}
dir=build/deb
cmake --preset deb
cmake --build --preset deb -j "$jobs"
rm -rf "$dir"/*.deb "$dir/check"
cpack --config "$dir/CPackConfig.cmake" -B "$dir"
packages=("$dir"/*.deb)

if command -v lintian >/dev/null; then
  lintian --fail-on error,warning "${packages[@]}"
else
  echo "package_deb: lintian is not installed: not checked by it"
fi

check=$PWD/$dir/check
mkdir -p "$check/project"
for package in "${packages[@]}"; do
  dpkg-deb -x "$package" "$check"
done
"$check/usr/bin/moe" --version
cp tests/tree/consumer/CMakeLists.txt examples/first_layer.cc "$check/project"
cmake -S "$check/project" -B "$check/cmake" -DCMAKE_PREFIX_PATH="$check/usr" -DCMAKE_BUILD_TYPE=Release
cmake --build "$check/cmake"
lib=$(dirname "$check"/usr/lib/*/libmoe.so)
export PKG_CONFIG_PATH=$lib/pkgconfig LD_LIBRARY_PATH=$lib
read -ra flags < <(pkg-config --cflags --libs moe)
c++ -std=c++20 "$check/project/first_layer.cc" -o "$check/first_layer" "${flags[@]}"
cc -std=c11 examples/first_layer.c -o "$check/first_layer_c" "${flags[@]}" -lm
for program in "$check/cmake/first_layer" "$check/first_layer" "$check/first_layer_c"; do
  "$program" | tee "$check/out"
  grep -q "step 200  loss 0\.00" "$check/out"
done
ls -l "${packages[@]}"
