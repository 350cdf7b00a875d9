// Any bytes as the index of a sharded checkpoint: no name it lets through leaves the folder.
#include <cstddef>
#include <cstdint>

#include <absl/strings/match.h>

#include "kernels/base/status_macros.h"
#include "moe/io/checkpoint.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto map = moe::ParseShardIndex("f", {reinterpret_cast<const char*>(data), size});
  if (!map.ok()) {
    MOE_CHECK(absl::IsDataLoss(map.status()));
    MOE_CHECK(absl::StartsWith(map.status().message(), "f: "));
    return 0;
  }
  MOE_CHECK(!map->empty());
  for (const auto& [tensor, file] : *map) {
    MOE_CHECK(!file.empty() && file.find('/') == file.npos && file[0] != '.');
    MOE_CHECK(file.find('\0') == file.npos);
  }
  return 0;
}
