#include "moe/cli/ckpt/export.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/ckpt/pieces.h"
#include "moe/hf/model_rule.h"
#include "moe/io/file.h"
#include "moe/io/safetensors_stream.h"
#include "moe/lm/run_settings.h"

namespace moe::ckpt {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::ordered_json;

struct Tensor {
  const ManifestTensor* source;
  SafetensorsEntry entry;
};

absl::Status Damaged(const CheckpointReader& reader, absl::string_view reason) {
  return WithFileFault(absl::DataLossError(absl::StrCat("STEP: ", reader.path(), ": ", reason)),
                       FileFault::kContent);
}

constexpr SafetensorsType TypeOf(DType type) {
  if (type == DType::kBFloat16) return SafetensorsType::kBF16;
  return type == DType::kFloat16 ? SafetensorsType::kF16 : SafetensorsType::kF32;
}

// Every tensor of the model in its order, under the format's name.
absl::StatusOr<std::vector<Tensor>> TensorsOf(const CheckpointReader& reader,
                                              const hf::ModelRule& rule,
                                              const lm::TransformerConfig& model, DType type) {
  std::map<std::string, const ManifestTensor*> left;
  for (const ManifestTensor& tensor : reader.manifest().tensors) {
    const auto& states = tensor.states;
    if (std::find(states.begin(), states.end(), "master") != states.end()) {
      left[tensor.name] = &tensor;
    }
  }
  std::vector<Tensor> tensors;
  for (hf::ModelTensor& tensor : hf::TensorsOf(rule, model)) {
    const auto found = left.find(tensor.canonical);
    const ManifestTensor* const source = found == left.end() ? nullptr : found->second;
    const int64_t rows = tensor.shape.size() == 1 ? 1 : tensor.shape[0], cols = tensor.shape.back();
    if (source == nullptr || source->type != SafetensorsType::kF32 || source->rows != rows ||
        source->cols != cols) {
      return Damaged(reader, absl::StrCat("no weights '", tensor.canonical, "' of shape [", rows,
                                          ", ", cols, "], which its settings ask for"));
    }
    left.erase(found);
    tensors.push_back({.source = source,
                       .entry = {.name = std::move(tensor.name),
                                 .type = TypeOf(type),
                                 .shape = std::move(tensor.shape),
                                 .size_bytes = rows * cols * SizeOf(type)}});
  }
  if (left.empty()) return tensors;
  return Damaged(reader, absl::StrCat("weights '", left.begin()->first,
                                      "', which its settings do not ask for"));
}

absl::Status Wrote(const absl::Status& status) {
  if (status.ok() || absl::IsResourceExhausted(status)) return status;
  return WithFileFault(absl::Status(status.code(), absl::StrCat("--out: ", status.message())),
                       FileFault::kWrite);
}

template <typename T>
absl::Status AppendTensor(CheckpointReader& reader, const ManifestTensor& tensor,
                          SafetensorsStream& stream) {
  std::vector<float> master;
  std::vector<T> rounded;
  for (const TensorBox& box : PiecesOf(tensor)) {
    master.resize(box.rows() * box.cols());
    const absl::Status read = reader.ReadBox(
        tensor.name, "master", box, MatrixView<float>(master.data(), box.rows(), box.cols()));
    if (!read.ok()) return Damaged(reader, read.message());
    rounded.clear();
    for (const float value : master) {
      rounded.push_back(T(value));
      if (std::isfinite(value) && !std::isfinite(static_cast<float>(rounded.back()))) {
        return absl::InvalidArgumentError(absl::StrCat(
            "'", tensor.name, "' has the weight ", value,
            ", expected --dtype f32: ", NameOf(DTypeOf<T>::value), " has none so large"));
      }
    }
    MOE_RETURN_IF_ERROR(Wrote(stream.Append(BytesOf<T>(rounded))));
  }
  return absl::OkStatus();
}

absl::Status WriteShard(CheckpointReader& reader, absl::Span<const Tensor> tensors,
                        const std::string& path, DType type) {
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : tensors) entries.push_back(tensor.entry);
  auto stream = SafetensorsStream::Create(path, entries, {{"format", "pt"}});
  MOE_RETURN_IF_ERROR(Wrote(stream.status()));
  for (const Tensor& tensor : tensors) {
    MOE_RETURN_IF_ERROR(WithStorageType(type, [&](auto element) {
      return AppendTensor<decltype(element)>(reader, *tensor.source, *stream);
    }));
  }
  return Wrote(stream->Commit());
}

absl::Status WriteText(const std::string& path, const std::string& text) {
  auto file = WholeFile::Create(path);
  MOE_RETURN_IF_ERROR(Wrote(file.status()));
  MOE_RETURN_IF_ERROR(Wrote(file->Append(text)));
  return Wrote(file->Commit());
}
absl::Status WriteJson(const std::string& path, const Json& document) {
  return WriteText(path, document.dump(2) + "\n");
}

// Ends of the shards, as indices of `tensors`.
std::vector<size_t> ShardEnds(absl::Span<const Tensor> tensors, int64_t max_bytes) {
  std::vector<size_t> ends;
  size_t first = 0;
  int64_t bytes = 0;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const int64_t more = tensors[i].entry.size_bytes;
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

// config.json comes last: what has none is no model. Adds every path before it is written.
absl::Status WriteModel(CheckpointReader& reader, const ExportOptions& options,
                        const std::string& config, absl::Span<const Tensor> tensors,
                        std::vector<std::string>& paths) {
  const auto path_of = [&](absl::string_view name) {
    return paths.emplace_back(absl::StrCat(options.folder, "/", name));
  };
  const std::vector<size_t> ends = ShardEnds(tensors, options.max_shard_bytes);
  Json map = Json::object();
  int64_t bytes = 0;
  size_t first = 0;
  for (size_t shard = 0; shard < ends.size(); ++shard) {
    const std::string name = ends.size() == 1 ? "model.safetensors"
                                              : absl::StrFormat("model-%05d-of-%05d.safetensors",
                                                                shard + 1, ends.size());
    for (size_t i = first; i < ends[shard]; ++i) {
      map[tensors[i].entry.name] = name;
      bytes += tensors[i].entry.size_bytes;
    }
    MOE_RETURN_IF_ERROR(WriteShard(reader, tensors.subspan(first, ends[shard] - first),
                                   path_of(name), options.type));
    first = ends[shard];
  }
  if (ends.size() > 1) {
    MOE_RETURN_IF_ERROR(WriteJson(path_of("model.safetensors.index.json"),
                                  {{"metadata", {{"total_size", bytes}}}, {"weight_map", map}}));
  }
  MOE_RETURN_IF_ERROR(WriteJson(path_of("generation_config.json"), {{"_from_model_config", true}}));
  return WriteText(path_of("config.json"), config);
}

absl::Status MakeEmptyFolder(const std::string& folder) {
  std::error_code error;
  if (fs::exists(folder, error) &&
      (!fs::is_directory(folder, error) || !fs::is_empty(folder, error))) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--out is '", folder, "', expected an empty folder, or one that is not there"));
  }
  error.clear();
  fs::create_directories(folder, error);
  if (!error) return absl::OkStatus();
  return Wrote(absl::UnavailableError(absl::StrCat(folder, ": ", error.message())));
}

}  // namespace

absl::StatusOr<std::vector<std::string>> Export(CheckpointReader& reader,
                                                const ExportOptions& options) {
  const hf::ModelRule* const rule = hf::FindModelRule(options.format);
  if (rule == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("no format '", options.format, "'"));
  }
  const auto stored = lm::StoredConfig(reader.manifest().sections);
  if (!stored.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat(stored.status().message(), ", expected one of moe train"));
  }
  lm::TransformerConfig model = stored->model;
  model.moe.router.hidden_size = model.hidden_size;
  if (const absl::Status status = hf::CheckExpressible(*rule, model); !status.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--format ", options.format, ": ", status.message()));
  }
  if (const absl::Status status = lm::ValidateTransformerConfig(model); !status.ok()) {
    return Damaged(reader, status.message());
  }
  if (hf::LeastTensors(model) > std::ssize(reader.manifest().tensors)) {
    return Damaged(reader, absl::StrCat(reader.manifest().tensors.size(),
                                        " tensors, fewer than its settings ask for"));
  }
  MOE_ASSIGN_OR_RETURN(const std::vector<Tensor> tensors,
                       TensorsOf(reader, *rule, model, options.type));
  const std::string config = hf::ModelConfigJson(*rule, model, stored->sequence_length,
                                                 options.type == DType::kBFloat16  ? "bfloat16"
                                                 : options.type == DType::kFloat16 ? "float16"
                                                                                   : "float32");
  std::vector<std::string> warnings;
  const double capacity = model.moe.router.capacity_factor.value_or(0);
  if (capacity > 0) {
    warnings.push_back(absl::StrCat("the run dropped tokens beyond --moe-expert-capacity-factor ",
                                    capacity, ", ", options.format, " drops none"));
  }
  MOE_RETURN_IF_ERROR(MakeEmptyFolder(options.folder));
  std::vector<std::string> paths;
  const absl::Status status = WriteModel(reader, options, config, tensors, paths);
  if (status.ok()) return warnings;
  std::error_code ignored;
  for (const std::string& path : paths) fs::remove(path, ignored);
  return status;
}

}  // namespace moe::ckpt
