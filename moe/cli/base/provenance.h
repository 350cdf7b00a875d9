// What a result comes from, for files of results and `moe --version`: the build and the machine.
#ifndef MOE_MOE_CLI_BASE_PROVENANCE_H_
#define MOE_MOE_CLI_BASE_PROVENANCE_H_

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>

#include "kernels/base/stream.h"

namespace moe::cli {

// Key and value, in the order in which they are shown. What cannot be told is "unknown".
using Facts = std::vector<std::pair<std::string, std::string>>;

// version; commit: 12 digits, "+" behind them where a file that git tracks differed from it,
// "unknown" where the sources were no checkout; build: "optimised" or "with assertions", and the
// compiler; features: "openmpi, CUDA, NCCL", or "none".
Facts BuildFacts();

// BuildFacts, then host; cpu: its model; cores that this process may run on; simd: what products
// run on, as kernels name it; gpu, with a CUDA `device` alone: its model; date: of the call, UTC,
// "2026-11-24T19:37:23Z". Of the environment, nothing.
Facts Provenance(const Device& device = {});

// The value behind "key: value" of a /proc file; empty if there is none.
std::string ProcValue(const std::string& path, absl::string_view key);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_PROVENANCE_H_
