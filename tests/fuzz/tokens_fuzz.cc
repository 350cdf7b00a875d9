// Any bytes as Megatron's index of a file of tokens: what it lets through lies inside the file.
#include <cstddef>
#include <cstdint>

#include <absl/strings/match.h>

#include "kernels/base/status_macros.h"
#include "moe/lm/tokens.h"

// The first two bytes: how long the file of tokens is.
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int64_t bin_bytes = data[0] | data[1] << 8;
  const auto index = moe::lm::ParseTokenIndex("f", {data + 2, size - 2}, bin_bytes);
  if (!index.ok()) {
    MOE_CHECK(absl::IsDataLoss(index.status()));
    MOE_CHECK(absl::StartsWith(index.status().message(), "f: "));
    return 0;
  }
  MOE_CHECK(bin_bytes % moe::lm::SizeOf(*index) == 0);
  return 0;
}
