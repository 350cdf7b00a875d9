#include "moe/checkpoint/manifest_format.h"

#include <absl/strings/str_cat.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <nlohmann/json.hpp>

namespace moe {

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
