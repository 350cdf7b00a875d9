#!/usr/bin/env bash
# Installs the Debian or Ubuntu packages that are missing, and only those.
#
#   scripts/install_deps.sh [--demo | --bench]
#
# --demo leaves out what only the tests need. --bench adds the peers of scripts/bench_cpu.sh.
# If nothing is missing: changes nothing, needs no root. If nvcc comes without cuobjdump, which a
# test needs, pip installs it and nvdisasm in build/cuda_tools; without pip or network that test is
# skipped.
# Exit codes: 0 everything is installed; 1 apt failed; 2 not possible here (the needed packages are
# listed).
set -euo pipefail

build=(
  g++ cmake ninja-build pkg-config
  libabsl-dev                   # status, spans, strings, time
  libhwy-dev                    # SIMD
  libtbb-dev                    # threads inside a rank
  librandom123-dev              # counter-based random numbers
  libxxhash-dev                 # checksums
  libhwloc-dev                  # moe doctor's information on cores and caches
  libfmt-dev                    # lines of the programs
  libboost-program-options-dev  # command line
  nlohmann-json3-dev            # configuration and result files
  libjs-chart.js                # charts in the pages of moe report
)
demo=(fortunes)  # the text for the demo's training
tests=(
  ccache                          # the presets share most of their objects
  libgtest-dev libgmock-dev
  libbenchmark-dev               # kernels alone: benchmarks/kernel_bench
  libopenmpi-dev openmpi-bin
  libmpich-dev mpich
  libssl-dev                     # authentication of ranks that meet over TCP, for NCCL
  lld                             # linker for a hundred programs
  clang-format clang-tidy
  clang libclang-rt-dev          # libFuzzer, for readers of untrusted files
  chromium                       # shows the pages of moe report; 414 MB with dependencies
  zsh fish groff-base            # shells' completion, and manual pages
  help2man                       # generates manual pages
  python3                        # strict parsers of the page, and of JSON, in tests
)
bench=(python3-torch libdnnl-dev libopenblas-dev)  # compared with the CPU path

case "${1-}" in
  "") wanted=("${build[@]}" "${demo[@]}" "${tests[@]}") ;;
  --demo) wanted=("${build[@]}" "${demo[@]}") ;;
  --bench) wanted=("${build[@]}" "${demo[@]}" "${tests[@]}" "${bench[@]}") ;;
  *)
    echo "usage: scripts/install_deps.sh [--demo | --bench]" >&2
    exit 2
    ;;
esac

cuda_tools() (
  tools=build/cuda_tools
  cd "$(dirname "${BASH_SOURCE[0]}")/.."
  nvcc=$(PATH=$PATH:${CUDA_HOME:-/usr/local/cuda}/bin command -v nvcc) || exit 0
  [[ -x $(dirname "$nvcc")/cuobjdump || -x $tools/nvidia/cu13/bin/cuobjdump ]] && exit 0
  command -v cuobjdump >/dev/null && exit 0
  echo "install_deps: installing cuobjdump and nvdisasm into $tools"
  python3 -m pip install -q --disable-pip-version-check --root-user-action=ignore --retries 0 --no-deps --target "$tools" \
    nvidia-cuda-cuobjdump==13.2.86 nvidia-cuda-nvdisasm==13.2.86 >&2 ||
    echo "install_deps: not installed: the test cuda_loops is skipped" >&2
)
if [[ ${1-} != --demo ]]; then
  cuda_tools
fi

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
  echo "install_deps: this system has no apt. Needed, by their Debian names:" >&2
  printf '  %s\n' "${wanted[@]}" >&2
  exit 2
fi

missing=()
for package in "${wanted[@]}"; do
  status=$(dpkg-query -W -f='${Status}' "$package" 2>/dev/null || true)
  [[ $status == "install ok installed" ]] || missing+=("$package")
done
if ((${#missing[@]} == 0)); then
  echo "install_deps: all ${#wanted[@]} packages are installed"
  exit 0
fi

as_root=()
if ((EUID != 0)); then
  if ! command -v sudo >/dev/null; then
    echo "install_deps: neither root nor sudo. As root, run:" >&2
    echo "  apt-get install --no-install-recommends ${missing[*]}" >&2
    exit 2
  fi
  as_root=(sudo)
fi

echo "install_deps: installing ${missing[*]}"
"${as_root[@]}" apt-get update -qq || { echo "install_deps: apt-get update failed" >&2; exit 1; }
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
  apt-get install -y -qq --no-install-recommends "${missing[@]}" ||
  { echo "install_deps: apt-get install failed" >&2; exit 1; }
