// Any bytes as recorded routing: what is accepted is written and read again as the same bytes, and
// keeps to the limits that its header promises.
#include <cstddef>
#include <cstdint>
#include <string>

#include <absl/status/status.h>
#include <absl/strings/match.h>
#include <absl/strings/string_view.h>

#include "kernels/base/status_macros.h"
#include "moe/io/routing_trace.h"

namespace {

std::string TextOf(const moe::RoutingTrace& trace) {
  std::string text = moe::HeaderLine(trace.header);
  for (const moe::RoutingTraceRecord& record : trace.records) text += moe::RecordLine(record);
  return text;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const absl::string_view text(reinterpret_cast<const char*>(data), size);
  const auto trace = moe::ParseRoutingTrace("f", text);
  if (!trace.ok()) {
    MOE_CHECK(absl::IsDataLoss(trace.status()));
    MOE_CHECK(absl::StartsWith(trace.status().message(), "f:"));
    return 0;
  }
  const moe::RoutingTraceHeader& header = trace->header;
  for (const moe::RoutingTraceRecord& record : trace->records) {
    MOE_CHECK(record.tokens.size() == static_cast<size_t>(header.ranks));
    MOE_CHECK(record.slots.size() == record.tokens.size() * header.num_experts);
    for (int r = 0; r < header.ranks; ++r) {
      for (const int64_t slots : record.of_rank(r, header.num_experts)) {
        MOE_CHECK(slots >= 0 && slots <= record.tokens[r]);
      }
    }
  }
  const std::string written = TextOf(*trace);
  const auto again = moe::ParseRoutingTrace("f", written);
  MOE_CHECK(again.ok() && TextOf(*again) == written);
  return 0;
}
