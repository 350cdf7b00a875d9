#include "moe/io/model_files.h"

#include <cmath>
#include <filesystem>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"

namespace moe {
namespace {

using Append = absl::FunctionRef<absl::Status(size_t, SafetensorsStream&)>;

absl::Status Wrote(const absl::Status& status) {
  return WithFileFault(status, FileFault::kWrite);
}

// Ends of the shards, as indices of `tensors`.
std::vector<size_t> ShardEnds(absl::Span<const SafetensorsEntry> tensors, int64_t max_bytes) {
  std::vector<size_t> ends;
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t more = tensors[i].size_bytes;
    if (i > first &&
        (bytes + more > max_bytes || static_cast<int64_t>(i - first) == kMaxSafetensorsTensors)) {
      ends.push_back(i);
      first = i;
      bytes = 0;
    }
    bytes += more;
  }
  ends.push_back(tensors.size());
  return ends;
}

absl::Status WriteShard(const std::string& path, absl::Span<const SafetensorsEntry> tensors,
                        size_t first, size_t end, Append append) {
  auto stream =
      SafetensorsStream::Create(path, tensors.subspan(first, end - first), {{"format", "pt"}});
  MOE_RETURN_IF_ERROR(Wrote(stream.status()));
  for (size_t i = first; i < end; ++i) MOE_RETURN_IF_ERROR(append(i, *stream));
  return Wrote(stream->Commit());
}

// Files of a model, removed again unless all of them are there.
class NewFiles {
 public:
  ~NewFiles() {
    std::error_code ignored;
    for (const std::string& path : paths_) std::filesystem::remove(path, ignored);
  }
  void Add(std::string path) { paths_.push_back(std::move(path)); }
  void Keep() { paths_.clear(); }

 private:
  std::vector<std::string> paths_;
};

}  // namespace

SafetensorsType SafetensorsTypeOf(DType type) {
  if (type == DType::kBFloat16) return SafetensorsType::kBF16;
  return type == DType::kFloat16 ? SafetensorsType::kF16 : SafetensorsType::kF32;
}

absl::Status WriteModelFiles(const std::string& folder, absl::Span<const SafetensorsEntry> tensors,
                             int64_t max_shard_bytes, Append append, std::vector<ModelText> texts) {
  NewFiles files;
  const std::vector<size_t> ends = ShardEnds(tensors, max_shard_bytes);
  nlohmann::ordered_json map = nlohmann::ordered_json::object();
  int64_t bytes = 0;
  size_t first = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    const std::string name = ends.size() == 1 ? "model.safetensors"
                                              : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                                                shard + 1, ends.size());
    for (size_t i = first; i < ends[shard]; ++i) {
      map[tensors[i].name] = name;
      bytes += tensors[i].size_bytes;
    }
    const std::string path = absl::StrCat(folder, "/", name);
    MOE_RETURN_IF_ERROR(WriteShard(path, tensors, first, ends[shard], append));
    files.Add(path);
    first = ends[shard];
  }
  if (ends.size() > 1) {
    const nlohmann::ordered_json index = {{"metadata", {{"total_size", bytes}}},
                                          {"weight_map", map}};
    texts.insert(texts.begin(), {"model.safetensors.index.json", index.dump(2) + "\n"});
  }
  for (const ModelText& each : texts) {
    const std::string path = absl::StrCat(folder, "/", each.name);
    MOE_RETURN_IF_ERROR(Wrote(WriteText(path, each.text)));
    files.Add(path);
  }
  files.Keep();
  return absl::OkStatus();
}

absl::Status AppendRounded(absl::string_view name, absl::Span<const float> values, DType type,
                           SafetensorsStream& stream) {
  return WithStorageType(type, [&](auto element) -> absl::Status {
    using T = decltype(element);
    std::vector<T> rounded;
    rounded.reserve(values.size());
    for (const float value : values) {
      rounded.push_back(T(value));
      if (std::isfinite(value) && !std::isfinite(static_cast<float>(rounded.back()))) {
        return absl::InvalidArgumentError(absl::StrCat("'", name, "' has the weight ", value,
                                                       ", expected --dtype f32: ", NameOf(type),
                                                       " has none so large"));
      }
    }
    return Wrote(stream.Append(BytesOf<T>(rounded)));
  });
}

}  // namespace moe
