#include "moe/checkpoint/manifest.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/checkpoint/manifest_format.h"
#include "moe/io/bounded_json.h"

namespace moe {
namespace {

// The document up to the checksum, which follows.
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

// A line that sweeps over the rows of a tensor and tracks the boxes that it crosses; boxes are
// those of one state, ascending by first row, then first column.
class Sweep {
 public:
  Sweep(const ManifestTensor& tensor, std::string name) : tensor_(tensor), name_(std::move(name)) {}

  absl::Status Add(const TensorBox& box) {
    MOE_RETURN_IF_ERROR(MoveTo(box.row_begin));
    const auto after = crossed_.lower_bound(box.col_begin);
    if (after != crossed_.end() && after->second.col_begin < box.col_end) {
      return Overlap(after->second, box);
    }
    if (after != crossed_.begin() && std::prev(after)->second.col_end > box.col_begin) {
      return Overlap(std::prev(after)->second, box);
    }
    crossed_.emplace_hint(after, box.col_begin, box);
    covered_cols_ += box.col_end - box.col_begin;
    ends_.emplace(box.row_end, box.col_begin);
    return absl::OkStatus();
  }

  absl::Status Finish() { return MoveTo(tensor_.rows); }

 private:
  // Rows up to `row` have all their boxes; takes out those that end there or before.
  absl::Status MoveTo(int64_t row) {
    while (row_ < row) {
      const int64_t end = ends_.empty() ? row : std::min(row, ends_.top().first);
      if (covered_cols_ < tensor_.cols) return Gap(end);
      row_ = end;
      while (!ends_.empty() && ends_.top().first == row_) {
        const auto ended = crossed_.find(ends_.top().second);
        covered_cols_ -= ended->second.col_end - ended->second.col_begin;
        crossed_.erase(ended);
        ends_.pop();
      }
    }
    return absl::OkStatus();
  }

  absl::Status Overlap(const TensorBox& one, const TensorBox& other) const {
    return absl::DataLossError(
        absl::StrCat(name_, ": boxes ", BoxText(one), " and ", BoxText(other), " overlap"));
  }

  absl::Status Gap(int64_t row_end) const {
    TensorBox gap = {.row_begin = row_, .row_end = row_end, .col_end = tensor_.cols};
    for (const auto& [col_begin, box] : crossed_) {
      if (col_begin > gap.col_begin) {
        gap.col_end = col_begin;
        break;
      }
      gap.col_begin = box.col_end;
    }
    return absl::DataLossError(absl::StrCat(name_, ": no box has ", BoxText(gap)));
  }

  using End = std::pair<int64_t, int64_t>;  // row, first column

  const ManifestTensor& tensor_;
  const std::string name_;
  int64_t row_ = 0;
  int64_t covered_cols_ = 0;
  std::map<int64_t, TensorBox> crossed_;  // by first column
  std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
};

}  // namespace

int32_t ManifestTensor::StateIndex(absl::string_view state) const {
  const auto found = std::find(states.begin(), states.end(), state);
  return found == states.end() ? -1 : static_cast<int32_t>(found - states.begin());
}

int32_t CheckpointManifest::TensorIndex(absl::string_view tensor) const {
  const auto found = std::lower_bound(
      tensors.begin(), tensors.end(), tensor,
      [](const ManifestTensor& one, absl::string_view name) { return one.name < name; });
  const bool there = found != tensors.end() && found->name == tensor;
  return there ? static_cast<int32_t>(found - tensors.begin()) : -1;
}

bool ManifestTensors::Add(const ManifestTensor& tensor) {
  ManifestTensor& known = by_name_.try_emplace(tensor.name, tensor).first->second;
  if (known.type != tensor.type || known.rows != tensor.rows || known.cols != tensor.cols) {
    return false;
  }
  for (const std::string& state : tensor.states) {
    const auto place = std::lower_bound(known.states.begin(), known.states.end(), state);
    if (place == known.states.end() || *place != state) known.states.insert(place, state);
  }
  return true;
}

std::vector<ManifestTensor> ManifestTensors::InOrder() const {
  std::vector<ManifestTensor> tensors;
  for (const auto& [name, tensor] : by_name_) tensors.push_back(tensor);
  return tensors;
}

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

std::string RunOf(const CheckpointSections& sections) {
  const nlohmann::json writer = nlohmann::json::parse(sections.written_by, nullptr, false);
  const auto run = writer.is_object() ? writer.find("run") : writer.end();
  return run != writer.end() && run->is_string() ? run->get<std::string>() : "";
}

std::string StateHashesText(const StateHashes& hashes) {
  const auto member = [](std::string* out, const StateHashes::value_type& hash) {
    absl::StrAppend(out, "\"", hash.first, "\":\"", HashHex(hash.second), "\"");
  };
  return absl::StrCat("{", absl::StrJoin(hashes, ",", member), "}");
}

absl::Status CheckTiling(absl::string_view file, const CheckpointManifest& manifest) {
  auto box = manifest.boxes.begin();
  for (size_t t = 0; t < manifest.tensors.size(); ++t) {
    const ManifestTensor& tensor = manifest.tensors[t];
    for (size_t s = 0; s < tensor.states.size(); ++s) {
      Sweep sweep(tensor, absl::StrCat(file, ": tensor '", tensor.name, "' ", tensor.states[s]));
      for (; box != manifest.boxes.end() && static_cast<size_t>(box->tensor) == t &&
             static_cast<size_t>(box->state) == s;
           ++box) {
        MOE_RETURN_IF_ERROR(sweep.Add(box->box));
      }
      MOE_RETURN_IF_ERROR(sweep.Finish());
    }
  }
  return absl::OkStatus();
}

std::string ManifestChecksum(absl::string_view text) {
  const XXH128_hash_t hash = XXH3_128bits(text.data(), text.size());
  return HashHex(hash.high64) + HashHex(hash.low64);
}

absl::Status ManifestSectionText::BeginObject() {
  Begin('{', '}');
  return Fits();
}

absl::Status ManifestSectionText::BeginList() {
  if (open_.empty()) return absl::DataLossError("a list, expected an object");
  Begin('[', ']');
  return Fits();
}

absl::Status ManifestSectionText::End() {
  text_.push_back(open_.back().end);
  open_.pop_back();
  return absl::OkStatus();
}

absl::Status ManifestSectionText::Key(std::string name) {
  if (!open_.back().keys.insert(name).second) {
    return absl::DataLossError(absl::StrCat("key '", Shown(name), "' stands there twice"));
  }
  Separate();
  absl::StrAppend(&text_, nlohmann::json(name).dump(), ":");
  after_key_ = true;
  return Fits();
}

absl::Status ManifestSectionText::Scalar(nlohmann::json value) {
  if (open_.empty()) {
    return absl::DataLossError(absl::StrCat("'", Shown(value.dump()), "', expected an object"));
  }
  Separate();
  text_.append(value.dump());
  return Fits();
}

void ManifestSectionText::Begin(char begin, char end) {
  Separate();
  text_.push_back(begin);
  open_.push_back({.end = end, .keys = {}});
}

void ManifestSectionText::Separate() {
  if (std::exchange(after_key_, false) || open_.empty()) return;
  if (!std::exchange(open_.back().empty, false)) text_.push_back(',');
}

absl::Status ManifestSectionText::Fits() const {
  if (static_cast<int64_t>(text_.size()) <= kMaxManifestSectionBytes) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat("a section of more than ", kMaxManifestSectionBytes, " bytes"));
}

}  // namespace moe
