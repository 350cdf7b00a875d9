// Models' configurations and weights, checkpoints, tokens.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
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

#include "kernels/base/status_macros.h"
#include "moe/checkpoint/manifest.h"
#include "moe/cli/generate/token_text.h"
#include "moe/hf/family.h"
#include "moe/hf/hf_config.h"
#include "moe/hf/model_rule.h"
#include "moe/io/bounded_json.h"
#include "moe/io/checkpoint.h"
#include "moe/io/safetensors.h"
#include "moe/io/tokenizer_file.h"
#include "moe/lm/data_kind.h"
#include "moe/lm/tokens.h"
#include "tests/fuzz/targets.h"

namespace moe {

namespace fuzz {
namespace {

using Json = nlohmann::json;
using Elements = unsigned __int128;

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

// A whole model's config.json: names and shapes of all tensors follow, and its text reads back.
void ModelConfig(Bytes bytes) {
  const auto config = hf::ParseModelConfig("f", TextOf(bytes));
  if (absl::IsUnimplemented(config.status())) {
    MOE_CHECK(absl::StartsWith(config.status().message(), "f: "));
    return;
  }
  if (!Accepted(config)) return;
  MOE_CHECK(config->rule != nullptr);
  constexpr int64_t kMostTensors = 10'000;
  if (hf::LeastTensors(config->model) > kMostTensors) return;
  std::set<std::pair<std::string, int64_t>> names;
  for (const hf::ModelTensor& tensor : hf::TensorsOf(*config->rule, config->model)) {
    MOE_CHECK(names.emplace(tensor.name, tensor.first).second);
    int64_t elements = 1;
    for (const int64_t dim : tensor.shape) {
      MOE_CHECK(dim >= 1 && !__builtin_mul_overflow(elements, dim, &elements));
    }
  }
  if (!hf::CheckExpressible(*config->rule, config->model).ok()) return;
  const std::string written = hf::ModelConfigJson(*config->rule, config->model, 1, "float32");
  const auto again = hf::ParseModelConfig("f", written);
  MOE_CHECK(again.ok());
  MOE_CHECK(hf::ModelConfigJson(*again->rule, again->model, 1, "float32") == written);
}

// A tokenizer.json: every id below num_ids has its bytes, and any text of ids is UTF-8.
void Tokenizer(Bytes bytes) {
  const auto table = TokenTable::Parse("f", TextOf(bytes));
  if (absl::IsUnimplemented(table.status())) {
    MOE_CHECK(absl::StartsWith(table.status().message(), "f: "));
    return;
  }
  if (!Accepted(table)) return;
  MOE_CHECK(table->num_ids() >= 1 && table->num_ids() <= int64_t{1} << 31);
  cli::TokenText text(*table);
  std::string all;
  const auto most = static_cast<int32_t>(std::min<int64_t>(table->num_ids(), 1000));
  for (int32_t id = -1; id <= most; ++id) all += text.Take(id);
  all += text.End();
  MOE_CHECK(nlohmann::json::parse(nlohmann::json(all).dump()) == all);
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

// Whether every key of every object of the document stands there once; false if it is malformed.
bool HasUniqueKeys(absl::string_view document, Json& value) {
  bool unique = true;
  std::vector<std::set<std::string>> keys;
  const auto on_event = [&](int, Json::parse_event_t event, Json& parsed) {
    if (event == Json::parse_event_t::object_start) keys.emplace_back();
    if (event == Json::parse_event_t::object_end) keys.pop_back();
    if (event == Json::parse_event_t::key) {
      unique = keys.back().insert(parsed.get<std::string>()).second && unique;
    }
    return true;
  };
  value = Json::parse(document.begin(), document.end(), on_event, /*allow_exceptions=*/false);
  return unique && !value.is_discarded();
}

// A list of whole numbers below 2^63.
bool AreCounts(const Json& list) {
  return list.is_array() && list.size() <= kMaxSafetensorsRank &&
         std::all_of(list.begin(), list.end(), [](const Json& each) {
           return each.is_number_unsigned() && each.get<uint64_t>() >> 63 == 0;
         });
}

// One tensor by the rules of the format; sets its range in the data.
bool IsTensor(const std::string& name, const Json& tensor, std::pair<uint64_t, uint64_t>& range) {
  static const std::map<std::string, int> bits = {
      {"BOOL", 8},        {"F4", 4},      {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"U8", 8},
      {"I8", 8},          {"F8_E5M2", 8}, {"F8_E4M3", 8}, {"F8_E8M0", 8}, {"F8_E4M3FNUZ", 8},
      {"F8_E5M2FNUZ", 8}, {"I16", 16},    {"U16", 16},    {"F16", 16},    {"BF16", 16},
      {"I32", 32},        {"U32", 32},    {"F32", 32},    {"C64", 64},    {"F64", 64},
      {"I64", 64},        {"U64", 64}};
  if (name.size() > kMaxSafetensorsNameBytes || !tensor.is_object() || tensor.size() != 3) {
    return false;
  }
  for (const char* const key : {"dtype", "shape", "data_offsets"}) {
    if (!tensor.contains(key)) return false;
  }
  const Json &type = tensor["dtype"], &shape = tensor["shape"], &offsets = tensor["data_offsets"];
  if (!type.is_string() || !bits.contains(type.get<std::string>())) return false;
  if (!AreCounts(shape) || !AreCounts(offsets) || offsets.size() != 2) return false;
  range = {offsets[0].get<uint64_t>(), offsets[1].get<uint64_t>()};
  Elements elements = 1;  // without zeros: no part of a shape may overflow
  bool empty = false;
  for (const Json& dim : shape) {
    empty = empty || dim.get<uint64_t>() == 0;
    elements *= std::max<uint64_t>(1, dim.get<uint64_t>());
    if (elements >> 63 != 0) return false;
  }
  const Elements all_bits = empty ? 0 : elements * bits.at(type.get<std::string>());
  return all_bits >> 63 == 0 && range.first <= range.second &&
         all_bits == Elements{8} * (range.second - range.first);
}

// The rules of the format and this project's limits, a second time.
bool IsSafetensors(Bytes bytes) {
  uint64_t header_bytes = 0;
  if (bytes.size() < sizeof(header_bytes)) return false;
  std::memcpy(&header_bytes, bytes.data(), sizeof(header_bytes));
  if (header_bytes > bytes.size() - sizeof(header_bytes)) return false;
  const absl::string_view text = TextOf(bytes.subspan(sizeof(header_bytes), header_bytes));
  Json header;
  if (!absl::StartsWith(text, "{") || !HasUniqueKeys(text, header)) return false;
  std::vector<std::pair<uint64_t, uint64_t>> ranges;
  for (const auto& [name, value] : header.items()) {
    if (name != "__metadata__") {
      if (!IsTensor(name, value, ranges.emplace_back())) return false;
      continue;
    }
    const auto is_text = [](const Json& each) {
      return each.is_string();
    };
    if (!value.is_object() || value.size() > kMaxSafetensorsMetadata) return false;
    if (!std::all_of(value.begin(), value.end(), is_text)) return false;
  }
  std::sort(ranges.begin(), ranges.end());
  uint64_t end = 0;
  for (const auto& range : ranges) {
    if (range.first != end) return false;
    end = range.second;
  }
  return end == bytes.size() - sizeof(header_bytes) - header_bytes;
}

// A safetensors file: the reader accepts what the rules accept, every tensor is within it, and
// readable.
void Safetensors(Bytes bytes) {
  const auto file = SafetensorsFile::Parse("f", bytes);
  MOE_CHECK(file.ok() == IsSafetensors(bytes));
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

// Text, or an array of ids of a type in the first byte, of a vocabulary in the next two.
void Data(Bytes bytes) {
  if (bytes.size() < 3) return;
  const auto type = static_cast<lm::TokenType>(bytes[0] % 7);
  const int64_t vocab_size = 1 + (bytes[1] | bytes[2] << 8);
  bytes = bytes.subspan(3);
  const lm::TextKind kind = lm::TextKindOf(bytes);
  const absl::Status text = lm::CheckText("f", bytes);
  MOE_CHECK(text.ok() == (kind == lm::TextKind::kText || kind == lm::TextKind::kEmpty));
  MOE_CHECK(text.ok() || absl::StartsWith(text.message(), "f: "));
  if (!lm::CheckPlainTokens("f", bytes, type, vocab_size).ok()) return;
  lm::Tokens tokens;
  const Bytes whole = bytes.first(bytes.size() - bytes.size() % lm::SizeOf(type));
  if (whole.empty()) return;
  tokens.Add(whole, type);
  const lm::StrayToken stray = lm::FindStray(whole, type, vocab_size);
  MOE_CHECK(stray.place < tokens.size());
  std::vector<int32_t> ids(static_cast<size_t>(stray.place < 0 ? tokens.size() : stray.place));
  tokens.Copy(0, absl::MakeSpan(ids));
  for (const int32_t id : ids) MOE_CHECK(0 <= id && id < vocab_size);
}

// Section `hash` of a manifest.
void Hashes(Bytes bytes) {
  const auto hashes = ParseStateHashes(TextOf(bytes));
  if (!Accepted(hashes, "")) return;
  MOE_CHECK(ParseStateHashes(StateHashesText(*hashes)).value() == *hashes);
}

}  // namespace

absl::Span<const Target> ModelFiles() {
  static constexpr Target kTargets[] = {{"config", Config},
                                        {"data", Data},
                                        {"hashes", Hashes},
                                        {"hf_config", HfConfig},
                                        {"index", Index},
                                        {"manifest", Manifest},
                                        {"model_config", ModelConfig},
                                        {"safetensors", Safetensors},
                                        {"tokenizer", Tokenizer},
                                        {"tokens", Tokens}};
  return kTargets;
}

}  // namespace fuzz
}  // namespace moe
