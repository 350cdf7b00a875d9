#!/usr/bin/env bash
# Builds fuzz.cc with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and runs one
# of its targets from its corpus:
#
#   tests/fuzz/run.sh TARGET BUILD_FOLDER [SECONDS]      (default: 30)
#
# TARGET is one of fuzz.cc's, or `build`, which runs nothing; `sources` below are the sources that
# it links. New inputs and crashes go to BUILD_FOLDER; the corpus here, small valid and hostile
# files, is only read.
# Exit codes: 0 nothing found; 77 no clang with libFuzzer here (skipped); else a finding (1), or it
# does not build.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${1:?usage: run.sh TARGET BUILD_FOLDER [SECONDS]}
build=${2:?usage: run.sh TARGET BUILD_FOLDER [SECONDS]}
seconds=${3:-30}
if [[ $target != build && ! -d $here/corpus/$target ]]; then
  echo "fuzz: no target '$target', expected build or one of $(ls "$here/corpus" | tr '\n' ' ')" >&2
  exit 2
fi
sources=(tests/fuzz/fuzz kernels/base/{xxh3,xxh3_avx2}
  moe/io/{bounded_json,checkpoint,file,file_system,routing_trace,safetensors,safetensors_header}
  moe/checkpoint/{manifest,manifest_read} moe/lm/{data_kind,tokens}
  moe/hf/{config_keys,families,family,hf_config,tensor_rule})

mkdir -p "$build/$target"
cxx=$(command -v clang++-14 || command -v clang++ || true)
flags=(-std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)
probe='#include <cstddef>
#include <cstdint>
extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
if [[ -z $cxx ]] || ! "$cxx" "${flags[@]}" -x c++ - -o "$build/probe" <<<"$probe" 2>"$build/probe.log"; then
  echo "fuzz: SKIPPED: no clang++ with libFuzzer (Debian: clang libclang-rt-dev)"
  exit 77
fi

if [[ ! -x $build/fuzz || -n $(find "$root"/{gating,kernels,moe,tests/fuzz} -newer "$build/fuzz" \
  \( -name '*.cc' -o -name '*.h' -o -name run.sh \) -print -quit) ]]; then
  rm -rf "$build/objects" && mkdir "$build/objects"
  export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 # build folders share objects
  printf '%s\0' "${sources[@]}" | xargs -0 -P "$(nproc)" -I{} bash -c '
    $(command -v ccache) "${@:3}" -I"$1" -c "$1/{}.cc" -o "$2/$(basename {}).o"' - "$root" \
    "$build/objects" "$cxx" "${flags[@]}"
  # Debian's Abseil is not instrumented; only values that it owns are passed to it.
  read -ra libraries < <(pkg-config --libs absl_status absl_statusor absl_strings absl_span)
  "$cxx" "${flags[@]}" "$build"/objects/*.o "${libraries[@]}" -o "$build/fuzz"
fi
[[ $target != build ]] || exit 0

# Inputs have at most 64 KiB, so that no allocation may exceed 64 MiB. AddressSanitizer's quarantine
# of freed memory is small here, so that the bound on the whole process is effective, too.
export ASAN_OPTIONS=quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1 FUZZ_TARGET=$target
"$build/fuzz" -max_total_time="$seconds" -max_len=65536 -timeout=10 \
  -malloc_limit_mb=64 -rss_limit_mb=512 -print_final_stats=1 -artifact_prefix="$build/$target/" \
  "$build/$target" "$here/corpus/$target" || {
  # Not the fuzzer's own exit code: for a finding that is 77, too, which here means skipped.
  echo "fuzz: $target: exit code $?; the input that shows it is in $build/$target" >&2
  exit 1
}
