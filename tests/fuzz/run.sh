#!/usr/bin/env bash
# Builds one fuzz target with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and
# runs it from its corpus:
#
#   tests/fuzz/run.sh TARGET BUILD_FOLDER [SECONDS]      (default: 30)
#
# TARGET is the name of a TARGET_fuzz.cc beside this script; `sources` below are what it links. New
# inputs and crashes go to BUILD_FOLDER; the corpus here is only read.
# Exit codes: 0 nothing found; 77 no clang with libFuzzer here (skipped); else a finding (1), or it
# does not build.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
target=${1:?usage: run.sh TARGET BUILD_FOLDER [SECONDS]}
build=${2:?usage: run.sh TARGET BUILD_FOLDER [SECONDS]}
seconds=${3:-30}

case "$target" in
  safetensors) sources=(io/{bounded_json,file,file_system,safetensors,safetensors_header}) ;;
  index) sources=(io/{bounded_json,checkpoint,file,file_system,safetensors,safetensors_header}) ;;
  config) sources=(io/bounded_json) ;;
  manifest) sources=(io/{bounded_json,safetensors,safetensors_header,file,file_system} checkpoint/{manifest,manifest_read}
    ../kernels/base/{xxh3,xxh3_avx2}) ;;
  routing) sources=(io/{bounded_json,routing_trace}) ;;
  hf_config)
    sources=(io/{bounded_json,file,file_system} hf/{config_keys,families,family,hf_config,tensor_rule})
    ;;
  tokens) sources=(io/{file,file_system} lm/tokens) ;;
  *)
    echo "fuzz: no target '$target', expected safetensors, index, config, manifest, routing, hf_config or tokens" >&2
    exit 2
    ;;
esac

mkdir -p "$build/new"
cxx=$(command -v clang++-14 || command -v clang++ || true)
flags=(-std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)
probe='#include <cstddef>
#include <cstdint>
extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
if [[ -z $cxx ]] || ! "$cxx" "${flags[@]}" -x c++ - -o "$build/probe" <<<"$probe" 2>"$build/probe.log"; then
  echo "fuzz: SKIPPED: no clang++ with libFuzzer (Debian: clang libclang-rt-dev)"
  exit 77
fi

launcher=$(command -v ccache || true)
objects=()
for source in "$here/${target}_fuzz.cc" "${sources[@]/#/$root/moe/}"; do
  source=${source%.cc}.cc
  object=$build/$(basename "$source" .cc).o
  $launcher "$cxx" "${flags[@]}" -I"$root" -c "$source" -o "$object"
  objects+=("$object")
done
# Debian's Abseil is not instrumented; all that crosses are values it owns.
read -ra libraries < <(pkg-config --libs absl_status absl_statusor absl_strings absl_span)
"$cxx" "${flags[@]}" "${objects[@]}" "${libraries[@]}" -o "$build/${target}_fuzz"

# Inputs have at most 64 KiB, so that no allocation may pass 64 MiB. AddressSanitizer keeps freed
# memory: little of it here, so that the bound on the whole process says something too.
export ASAN_OPTIONS=quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1
"$build/${target}_fuzz" -max_total_time="$seconds" -max_len=65536 -timeout=10 \
  -malloc_limit_mb=64 -rss_limit_mb=512 -print_final_stats=1 -artifact_prefix="$build/" \
  "$build/new" "$here/corpus/$target" || {
  # Not the fuzzer's own code: that of a finding is 77, too, which here means skipped.
  echo "fuzz: $target: exit code $?; the input that shows it is in $build" >&2
  exit 1
}
