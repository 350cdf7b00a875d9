// The index of a checkpoint of several files.
#include <string>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/checkpoint.h"

namespace moe {
namespace {

using Json = nlohmann::json;

// For n bytes of document: names are copies of disjoint parts of it, so n. A value takes a node of
// the map, at most 160 bytes with the allocator's own words: 2^18 of them 40 MiB. The lexer 24 MiB
// (JsonLimits). In all n + 64 MiB. The largest published models have 140,000 tensors.
constexpr JsonLimits kLimits = {.max_values = int64_t{1} << 18};

// Nothing that leads out of the index's folder, or to a file that is hidden there.
bool IsShardName(absl::string_view name) {
  return name.find('/') == name.npos && name.find('\0') == name.npos &&
         !absl::StartsWith(name, ".") && absl::EndsWith(name, ".safetensors");
}

// Keeps the weight_map of the document's object, and nothing else of it.
class IndexEvents final : public JsonEvents {
 public:
  absl::Status BeginObject() override {
    if (in_map_) return NoShardName("an object");
    if (depth_ == 1 && key_ == "weight_map") in_map_ = has_map_ = true;
    ++depth_;
    return absl::OkStatus();
  }

  absl::Status BeginList() override {
    if (in_map_) return NoShardName("a list");
    ++depth_;
    return absl::OkStatus();
  }

  absl::Status End() override {
    in_map_ = false;  // nothing opens inside it
    --depth_;
    return absl::OkStatus();
  }

  absl::Status Key(std::string name) override {
    if (in_map_ ? shard_of.contains(name) : depth_ == 1 && has_map_ && name == "weight_map") {
      return absl::DataLossError(absl::StrCat("key '", Shown(name), "' stands there twice"));
    }
    key_ = std::move(name);
    return absl::OkStatus();
  }

  absl::Status Scalar(Json value) override {
    if (!in_map_) return absl::OkStatus();
    auto* const name = value.get_ptr<std::string*>();
    if (name == nullptr || !IsShardName(*name)) return NoShardName(Shown(value.dump()));
    shard_of.emplace(std::move(key_), std::move(*name));
    return absl::OkStatus();
  }

  bool has_map() const { return has_map_; }
  ShardMap shard_of;

 private:
  absl::Status NoShardName(absl::string_view what) const {
    return absl::DataLossError(
        absl::StrCat("tensor '", Shown(key_), "': is in ", what,
                     ", expected the plain name of a *.safetensors file in the index's folder"));
  }

  int depth_ = 0;  // objects and lists around the next value
  bool in_map_ = false;
  bool has_map_ = false;
  std::string key_;
};

}  // namespace

absl::StatusOr<ShardMap> ParseShardIndex(absl::string_view file, absl::string_view document) {
  IndexEvents events;
  MOE_RETURN_IF_ERROR(ReadJsonEvents(file, document, kLimits, events));
  if (!events.has_map()) {
    return absl::DataLossError(
        absl::StrCat(file, ": no object weight_map, expected {\"weight_map\": {tensor: file}}"));
  }
  if (events.shard_of.empty()) {
    return absl::DataLossError(absl::StrCat(file, ": an empty weight_map, expected tensors"));
  }
  return std::move(events.shard_of);
}

}  // namespace moe
