// The readers of untrusted bytes, each under libFuzzer: bytes are refused with a message that names
// their origin, or the accepted result keeps the reader's promises.
#ifndef MOE_TESTS_FUZZ_TARGETS_H_
#define MOE_TESTS_FUZZ_TARGETS_H_

#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/match.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"

namespace moe::fuzz {

using Bytes = absl::Span<const uint8_t>;

struct Target {
  const char* name;  // of its folder in corpus/
  void (*read)(Bytes);
};

// Models, checkpoints and data (model_files.cc); what a run leaves for other commands, and machines
// (run_files.cc); what people write: flags, variables, configurations (words.cc).
absl::Span<const Target> ModelFiles();
absl::Span<const Target> RunFiles();
absl::Span<const Target> Words();

inline absl::string_view TextOf(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Whether `read` was accepted; a refusal must be of the kind and begin with the text.
template <typename T>
bool Accepted(const absl::StatusOr<T>& read, absl::string_view begin = "f: ",
              absl::StatusCode refusal = absl::StatusCode::kDataLoss) {
  if (read.ok()) return true;
  MOE_CHECK(read.status().code() == refusal);
  MOE_CHECK(!read.status().message().empty());
  MOE_CHECK(absl::StartsWith(read.status().message(), begin));
  return false;
}

}  // namespace moe::fuzz

#endif  // MOE_TESTS_FUZZ_TARGETS_H_
