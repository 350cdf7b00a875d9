// Any bytes as JSON, as configurations are read: what is accepted is what the library's own parser
// reads, and reads again from its text.
#include <cstddef>
#include <cstdint>
#include <string>

#include <absl/strings/match.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  const auto value = moe::ParseBoundedJson("f", text);
  if (!value.ok()) {
    MOE_CHECK(absl::IsDataLoss(value.status()));
    MOE_CHECK(absl::StartsWith(value.status().message(), "f: "));
    return 0;
  }
  MOE_CHECK(*value == nlohmann::json::parse(text));
  const auto again = moe::ParseBoundedJson("f", value->dump());
  MOE_CHECK(again.ok() && *again == *value);
  return 0;
}
