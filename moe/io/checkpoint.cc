#include "moe/io/checkpoint.h"

#include <filesystem>
#include <set>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe {
namespace {

namespace fs = std::filesystem;

constexpr char kSingleName[] = "model.safetensors";
constexpr char kIndexName[] = "model.safetensors.index.json";

// The file to read if the path is a folder.
absl::StatusOr<std::string> FileIn(const std::string& folder) {
  std::error_code ignored;  // files that cannot be accessed count as absent
  for (const char* const name : {kSingleName, kIndexName}) {
    std::string path = (fs::path(folder) / name).string();
    if (fs::exists(path, ignored)) return path;
  }
  return absl::NotFoundError(
      absl::StrCat("'", folder, "' has neither ", kSingleName, " nor ", kIndexName));
}

absl::StatusOr<SafetensorsFile> OpenShard(const std::string& index, const std::string& folder,
                                          const std::string& name, const std::string& tensor) {
  auto file = SafetensorsFile::Open(folder + name);
  if (!absl::IsNotFound(file.status())) return file;
  return absl::DataLossError(absl::StrCat(index, ": tensor '", Shown(tensor), "': is in '",
                                          Shown(name), "', which is not there"));
}

// For n bytes of document names take n, as copies of disjoint parts of it. A value takes a node of
// the map, at most 160 bytes with the allocator's own words: 2^18 of them 40 MiB. The lexer takes
// 24 MiB (JsonLimits). In all n + 64 MiB. The largest published models have 140,000 tensors.
constexpr JsonLimits kIndexLimits = {.max_values = int64_t{1} << 18};

// Refuses names of files outside of the index's folder, and of hidden files.
bool IsShardName(absl::string_view name) {
  return name.find('/') == name.npos && name.find('\0') == name.npos &&
         !absl::StartsWith(name, ".") && absl::EndsWith(name, ".safetensors");
}

// Keeps only the weight_map of the document's object.
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
    in_map_ = false;  // no nested object or list
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

  absl::Status Scalar(nlohmann::json value) override {
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

  int depth_ = 0;  // objects and lists that enclose the next value
  bool in_map_ = false;
  bool has_map_ = false;
  std::string key_;
};

}  // namespace

absl::StatusOr<ShardMap> ParseShardIndex(absl::string_view file, absl::string_view document) {
  IndexEvents events;
  MOE_RETURN_IF_ERROR(ReadJsonEvents(file, document, kIndexLimits, events));
  if (!events.has_map()) {
    return absl::DataLossError(
        absl::StrCat(file, ": no object weight_map, expected {\"weight_map\": {tensor: file}}"));
  }
  if (events.shard_of.empty()) {
    return absl::DataLossError(absl::StrCat(file, ": an empty weight_map, expected tensors"));
  }
  return std::move(events.shard_of);
}

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& path) {
  std::error_code ignored;  // on error the path is opened below, which reports why it fails
  std::string file = path;
  if (fs::is_directory(path, ignored)) {
    MOE_ASSIGN_OR_RETURN(file, FileIn(path));
  }
  if (absl::EndsWith(file, ".json")) return OpenIndex(file);
  MOE_ASSIGN_OR_RETURN(SafetensorsFile single, SafetensorsFile::Open(file));
  Checkpoint checkpoint;
  checkpoint.path_ = std::move(file);
  checkpoint.open_[""] = std::make_unique<SafetensorsFile>(std::move(single));
  return checkpoint;
}

absl::StatusOr<Checkpoint> Checkpoint::OpenIndex(const std::string& path) {
  MOE_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open(path));
  Checkpoint checkpoint;
  MOE_ASSIGN_OR_RETURN(checkpoint.shard_of_, ParseShardIndex(path, file.text()));
  checkpoint.path_ = path;
  const size_t slash = path.rfind('/');
  checkpoint.folder_ = slash == std::string::npos ? "" : path.substr(0, slash + 1);
  return checkpoint;
}

bool Checkpoint::Contains(absl::string_view name) const {
  if (shard_of_.empty()) return open_.at("")->Find(name) != nullptr;
  return shard_of_.contains(std::string(name));
}

std::vector<std::string> Checkpoint::Names() const {
  std::vector<std::string> names;
  for (const auto& [tensor, shard] : shard_of_) names.push_back(tensor);
  if (!shard_of_.empty()) return names;
  for (const SafetensorsTensor& tensor : open_.at("")->tensors()) names.push_back(tensor.name);
  return names;
}

std::vector<std::string> Checkpoint::Files() const {
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : shard_of_) shards.insert(folder_ + shard);
  std::vector<std::string> files = {path_};
  files.insert(files.end(), shards.begin(), shards.end());
  return files;
}

absl::StatusOr<CheckpointTensor> Checkpoint::Find(absl::string_view name) {
  const auto entry = shard_of_.find(std::string(name));
  if (!Contains(name)) {
    return absl::NotFoundError(absl::StrCat(path_, ": no tensor '", Shown(name), "'"));
  }
  const SafetensorsFile* file = nullptr;
  MOE_ASSIGN_OR_RETURN(file, Shard(entry == shard_of_.end() ? "" : entry->second));
  return CheckpointTensor{.file = file, .tensor = file->Find(name)};
}

absl::StatusOr<const SafetensorsFile*> Checkpoint::Shard(const std::string& name) {
  const auto found = open_.find(name);
  if (found != open_.end()) return found->second.get();
  std::unique_ptr<SafetensorsFile> file;
  for (const auto& [tensor, shard] : shard_of_) {
    if (shard != name) continue;
    if (file == nullptr) {
      MOE_ASSIGN_OR_RETURN(SafetensorsFile opened, OpenShard(path_, folder_, name, tensor));
      file = std::make_unique<SafetensorsFile>(std::move(opened));
    }
    if (file->Find(tensor) == nullptr) {
      return absl::DataLossError(absl::StrCat(path_, ": tensor '", Shown(tensor), "': is not in '",
                                              Shown(name), "', where the index says it is"));
    }
  }
  return (open_[name] = std::move(file)).get();
}

}  // namespace moe
