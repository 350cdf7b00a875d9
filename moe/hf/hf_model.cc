#include "moe/hf/hf_model.h"

#include <algorithm>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"

namespace moe::hf {
namespace {

constexpr char kEmbedding[] = "model.embed_tokens.weight";
constexpr char kOutput[] = "lm_head.weight";

constexpr int64_t kMostElements = int64_t{1} << 20;  // that are read at a time

// Of one shape [rows, cols], as numbers, whatever their types.
absl::StatusOr<bool> AreEqual(const CheckpointTensor& a, const CheckpointTensor& b) {
  const int64_t rows = a.tensor->shape[0], cols = a.tensor->shape[1];
  const int64_t most = std::max<int64_t>(1, kMostElements / cols);
  std::vector<float> of_a, of_b;
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    for (const auto& [of, values] : {std::pair(&a, &of_a), std::pair(&b, &of_b)}) {
      values->resize(count * cols);
      MOE_RETURN_IF_ERROR(
          of->file->ReadFloat32(RowsOf(*of->tensor, row, count), absl::MakeSpan(*values)));
    }
    if (of_a != of_b) return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<HfModel> HfModel::Open(const std::string& folder) {
  MOE_ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(folder));
  MOE_ASSIGN_OR_RETURN(Checkpoint files, Checkpoint::Open(folder));
  HfModel model(folder, std::move(config), std::move(files));
  MOE_RETURN_IF_ERROR(model.UntieDifferent());
  MOE_RETURN_IF_ERROR(model.FindTensors());
  return model;
}

absl::Status HfModel::UntieDifferent() {
  lm::TransformerConfig& model = config_.model;
  if (!model.tied_embeddings || !files_.Contains(kOutput)) return absl::OkStatus();
  const int64_t shape[] = {model.vocab_size, model.hidden_size};
  MOE_ASSIGN_OR_RETURN(const CheckpointTensor embedding, FindTensor(files_, kEmbedding, shape));
  MOE_ASSIGN_OR_RETURN(const CheckpointTensor output, FindTensor(files_, kOutput, shape));
  MOE_ASSIGN_OR_RETURN(model.tied_embeddings, AreEqual(embedding, output));
  if (model.tied_embeddings) return absl::OkStatus();
  warnings_.push_back(absl::StrCat(files_.path(), ": ", kOutput, " is another than ", kEmbedding,
                                   ": they are not tied, though config.json says "
                                   "tie_word_embeddings"));
  return absl::OkStatus();
}

absl::Status HfModel::FindTensors() {
  std::set<std::string> names;
  for (const ModelTensor& tensor : TensorsOf(rule(), config())) {
    MOE_ASSIGN_OR_RETURN(tensors_[tensor.canonical], FindTensor(files_, tensor.name, tensor.shape));
    names.insert(tensor.name);
  }
  for (const std::string& name : files_.Names()) {
    // Older files have frequencies, which follow from the base, and a tied output layer.
    const bool follows = absl::EndsWith(name, ".rotary_emb.inv_freq") ||
                         (config().tied_embeddings && name == kOutput);
    if (names.count(name) != 0 || follows) continue;
    return absl::DataLossError(absl::StrCat(files_.path(), ": tensor '", Shown(name),
                                            "': is none of the model's, expected those of ",
                                            rule().model_type, "'s configuration alone"));
  }
  return absl::OkStatus();
}

std::vector<CheckpointTensor> HfModel::tensors() const {
  std::vector<CheckpointTensor> all;
  for (const auto& [name, tensor] : tensors_) all.push_back(tensor);
  return all;
}

absl::Status HfModel::LoadTensor(const CanonicalTensor& tensor, int64_t first, Parameter& parameter,
                                 const ParameterStore& store, Stream& stream) const {
  const auto found = tensors_.find(tensor.name);
  if (found == tensors_.end() || found->second.tensor->num_elements != tensor.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("HfModel::Load: '", tensor.name, "' of ", tensor.size(),
                     " elements, expected one of the model in ", files_.path()));
  }
  const auto& [file, whole] = found->second;
  const int64_t rows = whole->shape[0], cols = tensor.size() / rows;
  const int64_t most = std::max<int64_t>(1, kMostElements / cols);
  std::vector<float> values;
  for (int64_t row = 0; row < rows; row += most) {
    const int64_t count = std::min(most, rows - row);
    values.resize(count * cols);
    MOE_RETURN_IF_ERROR(file->ReadFloat32(RowsOf(*whole, row, count), absl::MakeSpan(values)));
    MOE_RETURN_IF_ERROR(store.WriteMaster(parameter, values, stream, first + row * cols));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> HfModel::Borrow(const ParameterStore& store, Parameter& parameter) const {
  std::vector<std::optional<BorrowedRows>> rows;
  for (const CanonicalTensor& part : parameter.parts()) {
    const auto found = tensors_.find(part.name);
    if (found == tensors_.end()) return false;
    rows.push_back(RowsToBorrow(*found->second.file, *found->second.tensor, store.compute()));
    // The model's passes keep states, for which a parameter lies in one piece.
    const size_t last = rows.size() - 1;
    const bool apart = last > 0 && rows[last] && rows[last - 1] &&
                       rows[last]->values.begin() != rows[last - 1]->values.end();
    if (apart) return false;
  }
  return BorrowIfWhole(store, parameter, rows);
}

absl::Status HfModel::Load(ParameterStore& store, const Context& context, LoadBy by) const {
  for (const auto& parameter : store.parameters()) {
    if (by == LoadBy::kBorrow) {
      MOE_ASSIGN_OR_RETURN(const bool borrowed, Borrow(store, *parameter));
      if (borrowed) continue;
    }
    int64_t first = 0;
    for (const CanonicalTensor& part : parameter->parts()) {
      MOE_RETURN_IF_ERROR(
          LoadTensor(part, first, *parameter, store, StreamOf(*parameter, context)));
      first += part.size();
    }
  }
  return context.compute->Synchronize();
}

}  // namespace moe::hf
