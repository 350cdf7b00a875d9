#!/usr/bin/env bash
# Builds moe in every way that docs/install.md names, each up to a first layer that learns:
#
#   scripts/builds.sh [way...]      ways: release shared gcc clang flags abseil cuda torch (default: all)
#
#   release   cmake without a preset, CMAKE_BUILD_TYPE=Release, no compiler launcher; the program; the
#             installed archives by find_package and by pkg-config, from C++ and from C
#   shared    libmoe.so by pkg-config, from C++ and from C
#   gcc       FetchContent, compiled by g++; clang: by clang++
#   flags     add_subdirectory in a project with -Wall -Werror -fno-exceptions and C++17 as its default
#   abseil    FetchContent beside an Abseil that the project fetches itself, that of PyPI's grpcio
#   cuda      add_subdirectory with MOE_ENABLE_CUDA=ON under -Wall -Werror; runs on the CPU
#   torch     find_package(moe COMPONENTS torch), and the loop of every LibTorch program
#
# Needs what scripts/install_deps.sh --demo installs, and clang, python3-pip and libtorch-dev of
# Debian and nvcc for the ways named after them; a way whose tools are missing is skipped, by name.
# Without a compiler cache half an hour on two cores. Uses build/ways/<way>/, where each has its
# log, which starts anew. At the end "N passed, N failed"; exit code 1 if one failed.
set -uo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
exec </dev/null
unset CMAKE_CXX_COMPILER_LAUNCHER CMAKE_GENERATOR
export CMAKE_GENERATOR=Ninja

all=(release shared gcc clang flags abseil cuda torch)
ways=("$@")
((${#ways[@]})) || ways=("${all[@]}")
for way in "${ways[@]}"; do
  [[ " ${all[*]} " == *" $way "* ]] && continue
  echo "builds: unknown way '$way', expected one of: ${all[*]}" >&2
  exit 2
done

work=$root/build/ways

# Runs the program of docs/first_layer.md: it must learn.
learns() { "$@" | tee /dev/stderr | grep -q "step 200  loss 0\.00"; }

# A project around moe in $dir/project: includes the given lines before and after moe, then the
# first layer.
around() { # lines before, lines that bring moe
  mkdir -p "$dir/project"
  cp "$root/examples/first_layer.cc" "$dir/project/"
  printf '%s\n' "cmake_minimum_required(VERSION 3.25)" "project(around LANGUAGES CXX)" "$1" "$2" \
    "add_executable(first_layer first_layer.cc)" "target_link_libraries(first_layer PRIVATE moe::moe)" \
    >"$dir/project/CMakeLists.txt"
}
fetch="include(FetchContent)
FetchContent_Declare(moe SOURCE_DIR $root SYSTEM)
FetchContent_MakeAvailable(moe)"
subdirectory="add_subdirectory($root moe)"

build_around() { # cmake arguments
  cmake -S "$dir/project" -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DMOE_MERGE_SOURCES=ON "$@" &&
    cmake --build "$dir/build" -j "$jobs" --target first_layer && learns "$dir/build/first_layer"
}

by_find_package() {
  mkdir -p "$dir/project"
  cp tests/tree/consumer/CMakeLists.txt examples/first_layer.cc "$dir/project/" &&
    cmake -S "$dir/project" -B "$dir/consumer" -DCMAKE_PREFIX_PATH="$dir/prefix" &&
    cmake --build "$dir/consumer" && learns "$dir/consumer/first_layer"
}

by_pkg_config() { # --static or nothing
  local pc flags libs
  pc=$(find "$dir/prefix" -name moe.pc) || return
  export PKG_CONFIG_PATH=${pc%/*} LD_LIBRARY_PATH=${pc%/pkgconfig/*}
  read -ra flags < <(pkg-config --cflags moe)
  read -ra libs < <(pkg-config --libs "$@" moe)
  c++ -std=c++20 -Wall -Wextra -Werror examples/first_layer.cc -o "$dir/cxx" "${flags[@]}" "${libs[@]}" &&
    learns "$dir/cxx" &&
    cc -std=c11 -Wall -Wextra -Werror -c examples/first_layer.c -o "$dir/c.o" "${flags[@]}" &&
    c++ "$dir/c.o" -o "$dir/c" "${libs[@]}" -lm && learns "$dir/c"
}

way_release() {
  cmake -S . -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DCCACHE_PROGRAM=OFF -DMOE_BUILD_TESTS=OFF \
    -DMOE_ENABLE_CUDA=OFF &&
    cmake --build "$dir/build" -j "$jobs" && "$dir/build/moe/cli/moe" --version &&
    cmake --install "$dir/build" --strip --prefix "$dir/prefix" && by_find_package && by_pkg_config --static
}

way_shared() {
  cmake -S . -B "$dir/build" -DCMAKE_BUILD_TYPE=Release -DMOE_BUILD_PROGRAMS=OFF -DBUILD_SHARED_LIBS=ON \
    -DMOE_ENABLE_CUDA=OFF -DMOE_MERGE_SOURCES=ON &&
    cmake --build "$dir/build" -j "$jobs" && cmake --install "$dir/build" --prefix "$dir/prefix" &&
    by_pkg_config
}

way_gcc() { around "" "$fetch" && build_around -DCMAKE_CXX_COMPILER=g++; }

way_clang() {
  command -v clang++ >/dev/null || return 77
  around "" "$fetch" && build_around -DCMAKE_CXX_COMPILER=clang++
}

way_flags() {
  around "set(CMAKE_CXX_STANDARD 17)
add_compile_options(-Wall -Werror -fno-exceptions)" "$subdirectory" && build_around
}

way_abseil() {
  python3 -m pip --version >/dev/null 2>&1 || return 77
  local package
  if ! compgen -G "$dir/grpcio-*.tar.gz" >/dev/null; then
    python3 -m pip download -q --no-deps --no-binary grpcio -d "$dir" grpcio || true
  fi
  package=$(compgen -G "$dir/grpcio-*.tar.gz" | head -n 1)
  [[ $package ]] || return 77
  tar -xzf "$package" -C "$dir" --strip-components=1 --wildcards '*/third_party/abseil-cpp' || return
  around "include(FetchContent)
set(ABSL_PROPAGATE_CXX_STD ON)
FetchContent_Declare(abseil SOURCE_DIR $dir/third_party/abseil-cpp)
FetchContent_MakeAvailable(abseil)" "$fetch" && build_around -DCMAKE_CXX_STANDARD=20
}

way_cuda() {
  [[ -x $(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc) ]] || return 77
  around "add_compile_options(-Wall -Werror)" "$subdirectory" &&
    build_around -DMOE_ENABLE_CUDA=ON -DCMAKE_CUDA_ARCHITECTURES=80-real
}

way_torch() {
  [[ ${Torch_DIR-} ]] || compgen -G '/usr/*/*/cmake/Torch/TorchConfig.cmake' || return 77
  cmake -S . -B "$dir/moe" -DCMAKE_BUILD_TYPE=Release -DMOE_BUILD_PROGRAMS=OFF -DMOE_ENABLE_CUDA=OFF \
    -DMOE_ENABLE_MPI=OFF -DMOE_MERGE_SOURCES=ON -DMOE_INSTALL=ON &&
    cmake --build "$dir/moe" -j "$jobs" && cmake --install "$dir/moe" --prefix "$dir/prefix" || return
  mkdir -p "$dir/project"
  cp examples/torch_gpt.cc "$dir/project/"
  cat >"$dir/project/CMakeLists.txt" <<'END'
cmake_minimum_required(VERSION 3.25)
project(gpt LANGUAGES CXX)
find_package(moe REQUIRED COMPONENTS torch)
add_executable(gpt torch_gpt.cc)
target_link_libraries(gpt PRIVATE moe::torch)
END
  cmake -S "$dir/project" -B "$dir/build" -DCMAKE_PREFIX_PATH="$dir/prefix" -DCMAKE_BUILD_TYPE=Release &&
    cmake --build "$dir/build" && examples/torch_gpt_test.sh "$dir/build/gpt"
}

passed=0 failed=0 rows=()
for way in "${ways[@]}"; do
  dir=$work/$way
  rm -rf "$dir/build" "$dir/project" "$dir/prefix" "$dir/consumer" "$dir/moe"
  mkdir -p "$dir"
  start=$SECONDS
  echo "=== $way"
  (set -e; way_"$way") >"$dir/log" 2>&1
  rc=$?
  case $rc in
    0) result=passed passed=$((passed + 1)) ;;
    77) result="skipped: its tools are missing" ;;
    *)
      result=FAILED failed=$((failed + 1))
      tail -n 30 "$dir/log"
      ;;
  esac
  rows+=("$(printf '%-8s %6ss  %s' "$way" $((SECONDS - start)) "$result")")
done
printf '%s\n' "${rows[@]}"
echo "$passed passed, $failed failed"
((failed == 0))
