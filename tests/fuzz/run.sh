#!/usr/bin/env bash
# Builds the fuzzers with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer, and runs
# one of the targets from its corpus:
#
#   tests/fuzz/run.sh TARGET BUILD_FOLDER [SECONDS [FLAG OF LIBFUZZER...]]      (default: 30)
#
# TARGET is a folder of corpus/, or `build`, which runs nothing; `units` below are the sources that
# are linked. New inputs and crashes go to BUILD_FOLDER; the corpus here, small valid and hostile
# inputs, is only read.
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
# Sources that are compiled as one: most of the time goes into the JSON library.
fuzz=(tests/fuzz/{fuzz,model_files,run_files,stand_ins,words})
avx2=(kernels/base/xxh3_avx2)
library=(comm/{bootstrap,hosts} kernels/base/{caught,log,printable,rng,xxh3}
  moe/checkpoint/{manifest,manifest_read,run_lock,step_folders}
  moe/hf/{config_keys,families,family,hf_config,model_export,model_rule,tensor_layout,tensor_rule}
  moe/io/{bounded_json,checkpoint,file,file_system,file_work,routing_trace,safetensors,safetensors_header,tokenizer_file}
  moe/lm/{data_kind,tokens,train_settings,transformer_config} moe/run/settings moe/train/trainer_options)
program=(moe/cli/base/{common_settings,config_file,data_files,deepspeed,exit_code,fault_settings,flags}
  moe/cli/base/{foreign_flags,live_file,program,run_status,settings,terminal,trace_file,train_options,train_settings}
  moe/cli/debug/flight_{analysis,files} moe/cli/generate/{token_text,utf8_stream} moe/cli/launch/{hosts,process})
results=(moe/cli/measure/{bench_row,fail_if,layer_bench,routing_spec,statistics,sweep_row,tables}
  moe/cli/report/{format,inputs,rows} moe/cli/sweep/axis)
plan=(comm/mesh/mesh_shape moe/cli/plan/calibration_file moe/lm/train_config moe/pipeline/schedule
  moe/plan/{calibration,machine,mesh_search,model_cost,step_time,traffic} moe/run/session moe/tensor/tensor_share moe/train/loss_scaler)
units=(library program results plan fuzz avx2) # the longest first

mkdir -p "$build/$target"
cxx=$(command -v clang++-14 || command -v clang++ || true)
flags=(-std=c++20 -gline-tables-only -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=undefined)
# lld asks for no definition of what unused functions call.
link=(-fuse-ld=lld -Wl,--gc-sections)
probe='#include <cstddef>
#include <cstdint>
extern "C" int LLVMFuzzerTestOneInput(const uint8_t*, size_t) { return 0; }'
if [[ -z $cxx ]] || ! "$cxx" "${flags[@]}" "${link[@]}" -x c++ - -o "$build/probe" <<<"$probe" 2>"$build/probe.log"; then
  echo "fuzz: SKIPPED: no clang++ with libFuzzer and lld (Debian: clang libclang-rt-dev lld)"
  exit 77
fi

if [[ ! -x $build/fuzz || -n $(find "$root"/{comm,gating,kernels,moe,tests/fuzz} -newer "$build/fuzz" \
  \( -name '*.cc' -o -name '*.h' -o -name run.sh \) -print -quit) ]]; then
  rm -rf "$build/objects" && mkdir "$build/objects"
  export CCACHE_BASEDIR=$root CCACHE_NOHASHDIR=1 # build folders share objects
  for unit in "${units[@]}"; do
    declare -n sources=$unit
    printf '#include "%s.cc"\n' "${sources[@]}" >"$build/objects/$unit.cc"
  done
  printf '%s\0' "${units[@]}" | xargs -0 -P "$(nproc)" -I{} bash -c '
    $(command -v ccache) "${@:3}" -ffunction-sections -fdata-sections -I"$1" -c "$2/{}.cc" -o "$2/{}.o"' \
    - "$root" "$build/objects" "$cxx" "${flags[@]}"
  # Debian's libraries are not instrumented; only values that they own are passed to them.
  read -ra libraries < <(pkg-config --libs absl_flat_hash_map absl_status absl_statusor absl_strings absl_span absl_time)
  "$cxx" "${flags[@]}" "${link[@]}" "$build"/objects/*.o "${libraries[@]}" -lboost_program_options -lfmt -o "$build/fuzz"
fi
[[ $target != build ]] || exit 0

# Inputs have at most 64 KiB, so that no allocation may exceed 64 MiB. AddressSanitizer's quarantine
# of freed memory is small here, so that the bound on the whole process is effective, too.
export ASAN_OPTIONS=quarantine_size_mb=16 UBSAN_OPTIONS=print_stacktrace=1 FUZZ_TARGET=$target
"$build/fuzz" -max_total_time="$seconds" -max_len=65536 -timeout=10 \
  -malloc_limit_mb=64 -rss_limit_mb=512 -print_final_stats=1 -artifact_prefix="$build/$target/" "${@:4}" \
  "$build/$target" "$here/corpus/$target" || {
  # Not the fuzzer's own exit code: for a finding that is 77, too, which here means skipped.
  echo "fuzz: $target: exit code $?; the input that shows it is in $build/$target" >&2
  exit 1
}
