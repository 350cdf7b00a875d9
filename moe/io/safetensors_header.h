// The JSON header of a safetensors file.
#ifndef MOE_MOE_IO_SAFETENSORS_HEADER_H_
#define MOE_MOE_IO_SAFETENSORS_HEADER_H_

#include <cstdint>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "moe/io/safetensors.h"

namespace moe {

inline constexpr char kSafetensorsMetadataKey[] = "__metadata__";

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // in order of names
  SafetensorsMetadata metadata;
};

// Checks everything that SafetensorsFile::Open promises, against `data_bytes` bytes of data.
// kDataLoss; `file` is the name in messages.
//
// Memory, for n bytes of header: n for names and metadata, which are copies of disjoint parts of
// it. The table grows by doubling: 3 * 2^16 * sizeof(SafetensorsTensor) < 18 MiB while it moves;
// shapes take at most kMaxSafetensorsTensors * (8 * kMaxSafetensorsRank + 16) < 14 MiB, the
// allocator's own words and the map's nodes 3 MiB, the lexer 24 MiB (JsonLimits). In all n + 59
// MiB.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::string_view file,
                                                         absl::string_view text,
                                                         int64_t data_bytes);

}  // namespace moe

#endif  // MOE_MOE_IO_SAFETENSORS_HEADER_H_
