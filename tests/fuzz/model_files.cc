// Passes any bytes to the readers of untrusted files: they are refused with a message that names
// the file, or the accepted result keeps the reader's promises.
//
//   FUZZ_TARGET=NAME fuzz [libFuzzer's flags] FOLDER...     NAME: of kTargets
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include <nlohmann/json.hpp>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"
#include "moe/hf/family.h"
#include "moe/hf/hf_config.h"
#include "moe/io/bounded_json.h"
#include "moe/io/checkpoint.h"
#include "moe/io/routing_trace.h"
#include "moe/io/safetensors.h"
#include "moe/lm/tokens.h"

namespace moe {

// The router's checks have tests of their own, and would add every gate and kernel to the program.
absl::Status ValidateRouterConfig(const RouterConfig& /*config*/) {
  return absl::OkStatus();
}

namespace {

using Bytes = absl::Span<const uint8_t>;
using Elements = unsigned __int128;

absl::string_view TextOf(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

// Whether the file "f" was read; if not, the message must begin with its name.
template <typename T>
bool Accepted(const absl::StatusOr<T>& read, absl::string_view begin = "f: ") {
  if (read.ok()) return true;
  MOE_CHECK(absl::IsDataLoss(read.status()));
  MOE_CHECK(absl::StartsWith(read.status().message(), begin));
  return false;
}

bool StaysInItsFolder(const std::string& file) {
  return !file.empty() && file.find('/') == file.npos && file.find('\0') == file.npos &&
         file[0] != '.';
}

// JSON, as configurations are read: the result must be that of the library's own parser, and its
// text must read back.
void Config(Bytes bytes) {
  const auto value = ParseBoundedJson("f", TextOf(bytes));
  if (!Accepted(value)) return;
  MOE_CHECK(*value == nlohmann::json::parse(TextOf(bytes)));
  const auto again = ParseBoundedJson("f", value->dump());
  MOE_CHECK(again.ok() && *again == *value);
}

// A model's config.json: sizes are within their ranges, and tensors' shapes can be multiplied out.
void HfConfig(Bytes bytes) {
  const auto config = hf::ParseHfConfig("f", TextOf(bytes));
  if (absl::IsUnimplemented(config.status())) {
    MOE_CHECK(absl::StartsWith(config.status().message(), "f: "));
    return;
  }
  if (!Accepted(config)) return;
  const MoeLayerConfig& layer = config->moe;
  MOE_CHECK(config->family != nullptr && config->num_layers() >= 1);
  MOE_CHECK(layer.router.num_experts >= 1 && layer.router.top_k >= 1);
  MOE_CHECK(layer.router.hidden_size >= 1 && layer.ffn_hidden_size >= 1);
  for (const hf::TensorRule& rule : config->family->tensors) {
    if (!hf::IsPresent(rule, layer)) continue;
    int64_t elements = 1;
    for (const int64_t dim : hf::TensorShape(rule, layer)) {
      MOE_CHECK(dim >= 1 && !__builtin_mul_overflow(elements, dim, &elements));
    }
    // CheckTotal's bound, doubled for gate and up.
    MOE_CHECK(elements <= int64_t{1} << 41);
  }
}

// The index of a sharded checkpoint.
void Index(Bytes bytes) {
  const auto map = ParseShardIndex("f", TextOf(bytes));
  if (!Accepted(map)) return;
  MOE_CHECK(!map->empty());
  for (const auto& [tensor, file] : *map) MOE_CHECK(StaysInItsFolder(file));
}

// Boxes that are reported to tile their tensors have as many elements as these.
void CheckElements(const CheckpointManifest& manifest) {
  Elements expected = 0, stored = 0;
  for (const ManifestTensor& tensor : manifest.tensors) {
    expected += static_cast<Elements>(tensor.rows) * static_cast<Elements>(tensor.cols) *
                tensor.states.size();
  }
  for (const ManifestBox& box : manifest.boxes) {
    stored += static_cast<Elements>(box.box.row_end - box.box.row_begin) *
              static_cast<Elements>(box.box.col_end - box.box.col_begin);
  }
  MOE_CHECK(stored == expected);
}

// Written and read again it gives the same bytes.
void CheckManifest(absl::string_view document) {
  const auto manifest = ParseManifest("f", document);
  if (!Accepted(manifest)) return;
  for (const ManifestFile& file : manifest->files) MOE_CHECK(StaysInItsFolder(file.name));
  for (const ManifestBox& box : manifest->boxes) {
    const ManifestTensor& tensor = manifest->tensors.at(box.tensor);
    MOE_CHECK(static_cast<size_t>(box.state) < tensor.states.size());
    MOE_CHECK(static_cast<size_t>(box.file) < manifest->files.size());
    MOE_CHECK(0 <= box.box.row_begin && box.box.row_end <= tensor.rows);
    MOE_CHECK(0 <= box.box.col_begin && box.box.col_end <= tensor.cols);
  }
  if (CheckTiling("f", *manifest).ok()) CheckElements(*manifest);
  const auto written = SerializeManifest(*manifest);
  MOE_CHECK(written.ok());
  const auto again = ParseManifest("f", *written);
  MOE_CHECK(again.ok() && SerializeManifest(*again).value() == *written);
}

// The manifest of a checkpoint, unchanged and with the checksum that it lacks.
void Manifest(Bytes bytes) {
  CheckManifest(TextOf(bytes));
  const XXH128_hash_t hash = XXH3_128bits(bytes.data(), bytes.size());
  CheckManifest(absl::StrCat(TextOf(bytes), ",\"checksum\":\"", HashHex(hash.high64),
                             HashHex(hash.low64), "\"}\n"));
}

std::string LinesOf(const RoutingTrace& trace) {
  std::string text = HeaderLine(trace.header);
  for (const RoutingTraceRecord& record : trace.records) text += RecordLine(record);
  return text;
}

// Recorded routing: written and read again it gives the same bytes, and it is within the limits
// that its header promises.
void Routing(Bytes bytes) {
  const auto trace = ParseRoutingTrace("f", TextOf(bytes));
  if (!Accepted(trace, "f:")) return;
  const RoutingTraceHeader& header = trace->header;
  for (const RoutingTraceRecord& record : trace->records) {
    MOE_CHECK(record.tokens.size() == static_cast<size_t>(header.ranks));
    MOE_CHECK(record.slots.size() == record.tokens.size() * header.num_experts);
    for (int r = 0; r < header.ranks; ++r) {
      for (const int64_t slots : record.of_rank(r, header.num_experts)) {
        MOE_CHECK(slots >= 0 && slots <= record.tokens[r]);
      }
    }
  }
  const std::string written = LinesOf(*trace);
  const auto again = ParseRoutingTrace("f", written);
  MOE_CHECK(again.ok() && LinesOf(*again) == written);
}

// A safetensors file: every tensor is within it, and readable.
void Safetensors(Bytes bytes) {
  const auto file = SafetensorsFile::Parse("f", bytes);
  if (!Accepted(file)) return;
  int64_t sum_bytes = 0;
  uint64_t sum = 0;  // sum over all bytes, so that each is read
  for (const SafetensorsTensor& tensor : file->tensors()) {
    MOE_CHECK(file->Find(tensor.name) == &tensor);
    const auto data = file->Data(tensor);
    for (const uint8_t byte : data) sum += byte;
    sum_bytes += static_cast<int64_t>(data.size());
    // No shape may misstate the size: at least four bits an element.
    MOE_CHECK(tensor.num_elements <= 2 * tensor.size_bytes);
    std::vector<float> values(static_cast<size_t>(tensor.num_elements));
    const absl::Status read = file->ReadFloat32(tensor, absl::MakeSpan(values));
    MOE_CHECK(read.ok() || absl::IsInvalidArgument(read));
  }
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  // Every byte after the header belongs to one tensor.
  MOE_CHECK(static_cast<uint64_t>(sum_bytes) == bytes.size() - sizeof(header_bytes) - header_bytes);
  MOE_CHECK(sum <= 255 * static_cast<uint64_t>(sum_bytes));
}

// Megatron's index of a file of tokens, whose length is in the first two bytes: all ranges are
// within that file.
void Tokens(Bytes bytes) {
  if (bytes.size() < 2) return;
  const int64_t bin_bytes = bytes[0] | bytes[1] << 8;
  const auto index = lm::ParseTokenIndex("f", bytes.subspan(2), bin_bytes);
  if (!Accepted(index)) return;
  MOE_CHECK(bin_bytes % lm::SizeOf(*index) == 0);
}

constexpr struct {
  const char* name;
  void (*read)(Bytes);
} kTargets[] = {{"config", Config},     {"hf_config", HfConfig}, {"index", Index},
                {"manifest", Manifest}, {"routing", Routing},    {"safetensors", Safetensors},
                {"tokens", Tokens}};

}  // namespace
}  // namespace moe

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const auto* const target = [] {
    const char* const name = std::getenv("FUZZ_TARGET");
    for (const auto& one : moe::kTargets) {
      if (name != nullptr && std::strcmp(name, one.name) == 0) return &one;
    }
    std::abort();
  }();
  target->read({data, size});
  return 0;
}
