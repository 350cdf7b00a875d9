#include "moe/checkpoint/manifest.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/checkpoint/manifest_format.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

// All but the checksum, which stands behind.
absl::StatusOr<std::string> TextBeforeChecksum(const CheckpointManifest& manifest) {
  MOE_ASSIGN_OR_RETURN(const std::string created, JsonString(manifest.created));
  std::string text =
      absl::StrCat("{\"format\":\"", kManifestFormat, "\",\"version\":", kManifestVersion,
                   ",\"step\":", manifest.step, ",\"created\":", created);
  for (size_t i = 0; i < kManifestSections.size(); ++i) {
    const char* const key = kManifestKeys[kFirstManifestSection + i];
    ManifestSectionText section;
    MOE_RETURN_IF_ERROR(ReadJsonEvents(key, manifest.sections.*kManifestSections[i],
                                       {.max_bytes = kMaxManifestSectionBytes}, section));
    absl::StrAppend(&text, ",\n\"", key, "\":", section.Take());
  }
  const char* separator = ",\n\"tensors\":{\n";
  std::vector<std::string> names;
  for (const ManifestTensor& tensor : manifest.tensors) {
    MOE_ASSIGN_OR_RETURN(const std::string name, JsonString(tensor.name));
    absl::StrAppend(&text, std::exchange(separator, ",\n"), name, ":{\"dtype\":\"",
                    NameOf(tensor.type), "\",\"shape\":[", tensor.rows, ",", tensor.cols,
                    "],\"states\":[\"", absl::StrJoin(tensor.states, "\",\""), "\"]}");
    names.push_back(name);
  }
  if (manifest.tensors.empty()) text.append(separator);
  separator = "},\n\"files\":[\n";
  for (const ManifestFile& file : manifest.files) {
    MOE_ASSIGN_OR_RETURN(const std::string name, JsonString(file.name));
    absl::StrAppend(&text, std::exchange(separator, ",\n"), "{\"name\":", name,
                    ",\"bytes\":", file.bytes, ",\"header_xxh3\":\"", HashHex(file.header_xxh3),
                    "\"}");
  }
  if (manifest.files.empty()) text.append(separator);
  separator = "],\n\"boxes\":[\n";
  for (const ManifestBox& box : manifest.boxes) {
    const auto [row_begin, row_end, col_begin, col_end] = box.box;
    absl::StrAppend(&text, std::exchange(separator, ",\n"), "{\"tensor\":", names[box.tensor],
                    ",\"state\":\"", manifest.tensors[box.tensor].states[box.state],
                    "\",\"box\":[");
    absl::StrAppend(&text, row_begin, ",", row_end, ",", col_begin, ",", col_end,
                    "],\"file\":", box.file, ",\"xxh3\":\"", HashHex(box.xxh3), "\"}");
  }
  if (manifest.boxes.empty()) text.append(separator);
  text.push_back(']');
  return text;
}

}  // namespace

void SortManifest(CheckpointManifest& manifest) {
  std::vector<int32_t> order(manifest.files.size()), position(manifest.files.size());
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(),
            [&](int32_t a, int32_t b) { return manifest.files[a].name < manifest.files[b].name; });
  std::vector<ManifestFile> files(manifest.files.size());
  for (size_t i = 0; i < order.size(); ++i) {
    position[order[i]] = static_cast<int32_t>(i);
    files[i] = std::move(manifest.files[order[i]]);
  }
  manifest.files = std::move(files);
  for (ManifestBox& box : manifest.boxes) box.file = position[box.file];
  std::sort(manifest.boxes.begin(), manifest.boxes.end(),
            [](const auto& a, const auto& b) { return BoxOrder(a) < BoxOrder(b); });
}

absl::StatusOr<std::string> SerializeManifest(const CheckpointManifest& manifest) {
  const auto text = [&]() -> absl::StatusOr<std::string> {
    MOE_ASSIGN_OR_RETURN(std::string document, TextBeforeChecksum(manifest));
    const std::string checksum = ManifestChecksum(document);
    absl::StrAppend(&document, kManifestChecksumKey, checksum, kManifestChecksumEnd);
    MOE_RETURN_IF_ERROR(ParseManifest(kManifestName, document).status());
    return document;
  }();
  if (absl::IsDataLoss(text.status())) {
    return absl::InvalidArgumentError(text.status().message());
  }
  return text;
}

std::string BoxName(absl::string_view tensor, absl::string_view state, const TensorBox& box) {
  return absl::StrCat(tensor, "|", state, "|", box.row_begin, ",", box.col_begin);
}

std::string BoxText(const TensorBox& box) {
  return absl::StrCat("[", box.row_begin, ",", box.row_end, ") x [", box.col_begin, ",",
                      box.col_end, ")");
}

uint64_t CheckpointHash(absl::Span<const uint8_t> bytes) {
  return Xxh3(bytes.data(), bytes.size());
}

std::string HashHex(uint64_t hash) {
  return absl::StrCat(absl::Hex(hash, absl::kZeroPad16));
}

std::string StateHashesText(const StateHashes& hashes) {
  const auto member = [](std::string* out, const StateHashes::value_type& hash) {
    absl::StrAppend(out, "\"", hash.first, "\":\"", HashHex(hash.second), "\"");
  };
  return absl::StrCat("{", absl::StrJoin(hashes, ",", member), "}");
}

}  // namespace moe
