#include <algorithm>
#include <filesystem>
#include <map>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/finite.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/stored_run.h"
#include "moe/cli/ckpt/ckpt.h"
#include "moe/hf/model_rule.h"
#include "moe/io/file.h"
#include "moe/io/tokenizer_file.h"
#include "moe/lm/run_settings.h"

namespace moe::ckpt {
namespace {

namespace fs = std::filesystem;

struct Tensor {
  const ManifestTensor* source;
  SafetensorsEntry entry;
};

absl::Status Damaged(const CheckpointReader& reader, absl::string_view reason) {
  return WithFileFault(absl::DataLossError(absl::StrCat("STEP: ", reader.path(), ": ", reason)),
                       FileFault::kContent);
}

// Every tensor of the model in order, under the format's name.
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
                                 .type = SafetensorsTypeOf(type),
                                 .shape = std::move(tensor.shape),
                                 .size_bytes = rows * cols * SizeOf(type)}});
  }
  if (left.empty()) return tensors;
  return Damaged(reader, absl::StrCat("weights '", left.begin()->first,
                                      "', which its settings do not ask for"));
}

// The error of a file that could not be written.
absl::Status Wrote(const absl::Status& status) {
  return FileFaultOf(status) == FileFault::kWrite ? Prefixed("--out", status) : status;
}

absl::Status AppendTensor(CheckpointReader& reader, const ManifestTensor& tensor, DType type,
                          SafetensorsStream& stream) {
  std::vector<float> master;
  for (const TensorBox& box : PiecesOf(tensor)) {
    master.resize(box.rows() * box.cols());
    const absl::Status read = reader.ReadBox(
        tensor.name, "master", box, MatrixView<float>(master.data(), box.rows(), box.cols()));
    if (absl::IsDataLoss(read)) return Damaged(reader, read.message());
    MOE_RETURN_IF_ERROR(read);
    if (const int64_t bad = CountNonFinite(master.data(), std::ssize(master)); bad > 0) {
      return Damaged(reader, absl::StrCat("'", tensor.name, "' has ", bad,
                                          " values that are not finite, expected none"));
    }
    MOE_RETURN_IF_ERROR(AppendRounded(tensor.name, master, type, stream));
  }
  return absl::OkStatus();
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
  return Wrote(FileError("make folder", folder, error.value(), FileFault::kWrite));
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
    return Damaged(reader, absl::StrCat(stored.status().message(), ", expected one of moe train"));
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
  std::vector<ModelText> texts = {{"generation_config.json", hf::GenerationConfigJson(model)}};
  if (const std::string path = cli::TokenizerPathOf(reader.path()); !path.empty()) {
    MOE_ASSIGN_OR_RETURN(const MappedFile tokenizer, MappedFile::Open(path));
    texts.push_back({kTokenizerName, std::string(tokenizer.text())});
  }
  texts.push_back({"config.json", config});
  MOE_RETURN_IF_ERROR(MakeEmptyFolder(options.folder));
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : tensors) entries.push_back(tensor.entry);
  // config.json is written last: a folder without it is not a model.
  MOE_RETURN_IF_ERROR(Wrote(WriteModelFiles(
      options.folder, entries, options.max_shard_bytes,
      [&](size_t i, SafetensorsStream& stream) {
        return AppendTensor(reader, *tensors[i].source, options.type, stream);
      },
      std::move(texts))));
  return warnings;
}

}  // namespace moe::ckpt
