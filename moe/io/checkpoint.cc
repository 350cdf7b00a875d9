#include "moe/io/checkpoint.h"

#include <filesystem>
#include <set>
#include <system_error>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe {
namespace {

namespace fs = std::filesystem;

constexpr char kSingleName[] = "model.safetensors";
constexpr char kIndexName[] = "model.safetensors.index.json";

// The file that stands for a folder.
absl::StatusOr<std::string> FileIn(const std::string& folder) {
  std::error_code ignored;  // what cannot be looked at is not there
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

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(const std::string& path) {
  std::error_code ignored;  // what cannot be looked at is opened, which says why it cannot
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
