# Sourced by gpu_check.sh: make_bundle fills the folder $bundle with what gpu_check.sh runs elsewhere,
# from the build in $dir, whose program is $moe, and the sources in $root and $peers.

# Libraries that every machine with the driver has, or whose versions belong to it.
system_library='^(linux-vdso|ld-linux.*|lib(c|m|pthread|dl|rt|stdc\+\+|gcc_s|cuda))\.'
# Those that come with PyTorch: too large to carry.
python_library='^lib(cublas|cublasLt|nccl|nvrtc|nvJitLink)\.'
limit_mib=64

# name path of every library that the programs name, "-" where it is not found.
libraries_of() {
  ldd "$@" | sed -n 's/^\t\([^ /]*\) => \(.*\) (0x.*/\1 \2/p; s/^\t\([^ ]*\) => not found/\1 -/p' |
    sort -u | while read -r name path; do
    [[ $name =~ $system_library || $name =~ $python_library ]] || echo "$name $path"
  done
}

carry_libraries() {
  local name path
  while read -r name path; do
    [[ $path != - ]] || { echo "gpu_check: $name was not found" >&2; return 1; }
    strip --strip-unneeded -o "$bundle/lib/$name" "$path" || return 1
  done < <(libraries_of "$bundle"/bin/*)
  # With the folder in front nothing else may come from this machine.
  LD_LIBRARY_PATH=$bundle/lib libraries_of "$bundle"/bin/* | while read -r name path; do
    [[ $path == "$bundle"/lib/* ]] || { echo "gpu_check: $name is not carried" >&2; return 1; }
  done
}

# Writes the bundle's CTestTestfile.cmake, and the programs of the tests labelled gpu to stdout.
bundle_tests() {
  ctest --test-dir "$dir" -L '^gpu$' --show-only=json-v1 | python3 -c '
import json, os, sys

with open(sys.argv[1], "w") as file:
    for test in json.load(sys.stdin)["tests"]:
        name = test["name"]
        if "command" not in test:
            sys.exit(f"gpu_check: {name} is not built: build the targets moe and device_tests")
        program, = test["command"]
        timeout = next(p["value"] for p in test["properties"] if p["name"] == "TIMEOUT")
        file.write(f"""add_test({name} "${{CMAKE_CURRENT_LIST_DIR}}/bin/{os.path.basename(program)}")
set_tests_properties({name} PROPERTIES LABELS gpu TIMEOUT {timeout:.0f}
  SKIP_REGULAR_EXPRESSION "no GPU: "
  ENVIRONMENT "MOE_TEST_GPU=1;LD_LIBRARY_PATH=$ENV{{GPU_CHECK_LIBRARIES}}")
""")
        print(program)
' "$bundle/CTestTestfile.cmake"
}

make_bundle() {
  local program programs list mib
  if [[ -e $bundle && ! -e $bundle/CTestTestfile.cmake && -n $(ls -A "$bundle") ]]; then
    echo "gpu_check: $bundle is not empty and not a bundle" >&2
    return 1
  fi
  rm -rf "$bundle"
  mkdir -p "$bundle"/{bin,lib,peers} || return 1
  list=$(bundle_tests) || return 1
  [[ $list ]] || { echo "gpu_check: no tests labelled gpu in $dir" >&2; return 1; }
  mapfile -t programs <<<"$list"
  [[ -x $dir/tests/$nccl_contract ]] && programs+=("$dir/tests/$nccl_contract")
  for program in "$moe" "${programs[@]}"; do
    strip -o "$bundle/bin/$(basename "$program")" "$program" || return 1
  done
  carry_libraries || return 1
  cp "$peers"/*.py "$bundle/peers/" && cp "$root"/scripts/{gpu_check.sh,gpu_table.py,nccl_one_gpu.sh} "$bundle/" || return 1
  git describe --always --dirty >"$bundle/version"
  mib=$(($(du -sk "$bundle" | cut -f 1) / 1024 + 1))
  echo "gpu_check: $bundle: $((${#programs[@]} + 1)) programs with their libraries, $mib MiB"
  ((mib < limit_mib)) || { echo "gpu_check: that is $limit_mib MiB or more" >&2; return 1; }
}
