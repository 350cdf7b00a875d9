#include "moe/hf/hf_model.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/xxh3.h"
#include "moe/io/bounded_json.h"

namespace moe::hf {
namespace {

constexpr char kEmbedding[] = "embed_tokens.weight";  // name below the root
constexpr char kOutput[] = "lm_head.weight";

constexpr int64_t kMostElements = int64_t{1} << 20;  // elements that are read at a time

// Whether two tensors of one shape [rows, cols] are equal as numbers, whatever their types.
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

absl::StatusOr<HfModel> HfModel::Open(const std::string& folder, const Upcycling& upcycling) {
  MOE_ASSIGN_OR_RETURN(ModelConfig config, ReadModelConfig(folder, upcycling));
  MOE_ASSIGN_OR_RETURN(Checkpoint files, Checkpoint::Open(folder));
  HfModel model(folder, std::move(config), std::move(files), upcycling);
  MOE_RETURN_IF_ERROR(model.FindLayouts());
  MOE_RETURN_IF_ERROR(model.UntieDifferent());
  MOE_RETURN_IF_ERROR(model.FindTensors());
  return model;
}

absl::Status HfModel::FindLayouts() {
  const lm::TransformerConfig& model = config();
  const auto has_embedding = [&](absl::string_view root) {
    return files_.Contains(absl::StrCat(root, kEmbedding));
  };
  const auto* const root = std::find_if(std::begin(kRoots), std::end(kRoots), has_embedding);
  if (root != std::end(kRoots)) layout_.root = *root;
  const int64_t shape[] = {model.vocab_size, model.hidden_size};
  MOE_RETURN_IF_ERROR(FindTensor(files_, absl::StrCat(layout_.root, kEmbedding), shape).status());
  layout_.upcycled = upcycling_.experts > 0;
  if (layout_.upcycled) return absl::OkStatus();
  layout_.layers.resize(model.num_layers);
  for (int64_t l = 0; l < model.num_layers; ++l) {
    if (!model.has_experts(l)) continue;
    const std::string layer = absl::StrCat(layout_.root, "layers.", l, ".");
    MOE_ASSIGN_OR_RETURN(layout_.layers[l], FindLayout(files_, config_.layer, layer));
  }
  return absl::OkStatus();
}

absl::Status HfModel::UntieDifferent() {
  lm::TransformerConfig& model = config_.model;
  if (!model.tied_embeddings || !files_.Contains(kOutput)) return absl::OkStatus();
  const int64_t shape[] = {model.vocab_size, model.hidden_size};
  const std::string name = absl::StrCat(layout_.root, kEmbedding);
  MOE_ASSIGN_OR_RETURN(const CheckpointTensor embedding, FindTensor(files_, name, shape));
  MOE_ASSIGN_OR_RETURN(const CheckpointTensor output, FindTensor(files_, kOutput, shape));
  MOE_ASSIGN_OR_RETURN(model.tied_embeddings, AreEqual(embedding, output));
  if (model.tied_embeddings) return absl::OkStatus();
  warnings_.push_back(absl::StrCat(files_.path(), ": ", kOutput, " is another than ", name,
                                   ": they are not tied, though config.json says "
                                   "tie_word_embeddings"));
  return absl::OkStatus();
}

absl::Status HfModel::FindTensors() {
  std::set<std::string> names;
  for (const ModelTensor& tensor : TensorsOf(config(), layout_)) {
    MOE_ASSIGN_OR_RETURN(const CheckpointTensor whole,
                         FindTensor(files_, tensor.name, tensor.shape));
    const auto& shape = tensor.part_shape.empty() ? tensor.shape : tensor.part_shape;
    tensors_[tensor.canonical] = {whole, PartOf(*whole.tensor, tensor.first, shape)};
    names.insert(tensor.name);
  }
  WarnOfOthers(names);
  return absl::OkStatus();
}

void HfModel::WarnOfOthers(const std::set<std::string>& names) {
  constexpr size_t kNamed = 3;
  std::vector<std::string> others;
  for (const std::string& name : files_.Names()) {
    // Older files hold frequencies, which follow from the base, and a tied output layer.
    const bool follows = absl::EndsWith(name, ".rotary_emb.inv_freq") ||
                         (config().tied_embeddings && name == kOutput);
    if (names.count(name) == 0 && !follows) others.push_back(Shown(name));
  }
  if (others.empty()) return;
  const size_t named = std::min(others.size(), kNamed);
  const std::string more =
      named == others.size() ? "" : absl::StrCat(" and ", others.size() - named, " more");
  warnings_.push_back(absl::StrCat(
      files_.path(), ": ", others.size(), " tensor(s) not read, which ", rule().model_type,
      "'s configuration does not have: ",
      absl::StrJoin(others.begin(), others.begin() + static_cast<std::ptrdiff_t>(named), ", "),
      more));
}

std::vector<CheckpointTensor> HfModel::tensors() const {
  std::vector<CheckpointTensor> all;
  std::set<const SafetensorsTensor*> seen;
  for (const auto& [name, part] : tensors_) {
    if (seen.insert(part.whole.tensor).second) all.push_back(part.whole);
  }
  return all;
}

const HfModel::Part* HfModel::Find(const CanonicalTensor& tensor) const {
  const auto found = tensors_.find(tensor.name);
  const bool fits = found != tensors_.end() && found->second.tensor.num_elements == tensor.size();
  return fits ? &found->second : nullptr;
}

// A dense model has no routers.
bool HfModel::IsFresh(const CanonicalTensor& tensor) const {
  return layout_.upcycled && absl::StrContains(tensor.name, ".mlp.gate.");
}

// To elements of an expert's tensor from `first` on: numbers keyed by its name, as initial weights
// are (parameter_store.cc), so that no layout shows in them.
void HfModel::AddNoise(const CanonicalTensor& tensor, int64_t first,
                       absl::Span<float> values) const {
  if (upcycling_.noise == 0 || !absl::StrContains(tensor.name, ".mlp.experts.")) return;
  const std::string name = absl::StrCat(tensor.name, ".noise");
  RandomKey key = {.seed = upcycling_.seed,
                   .purpose = RandomPurpose::kInit,
                   .layer = static_cast<uint32_t>(Xxh3(name.data(), name.size()))};
  for (float& value : values) {
    key.item = static_cast<uint64_t>(first / 2);
    value += static_cast<float>(upcycling_.noise * Normal(key, static_cast<uint32_t>(first % 2)));
    ++first;
  }
}

absl::Status HfModel::LoadBox(const BoxInMemory& held, Parameter& parameter,
                              const ParameterStore& store, Stream& stream) const {
  const CanonicalTensor& tensor = *held.tensor;
  if (IsFresh(tensor)) return absl::OkStatus();
  const Part* const found = Find(tensor);
  if (found == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("HfModel::Load: '", tensor.name, "' of ", tensor.size(),
                     " elements, expected one of the model in ", files_.path()));
  }
  const TensorBox& box = held.box;
  const int64_t cols = box.cols(), most = std::max<int64_t>(1, kMostElements / cols);
  std::vector<float> values;
  for (int64_t row = box.row_begin; row < box.row_end; row += most) {
    const int64_t count = std::min(most, box.row_end - row);
    values.resize(count * cols);
    const int64_t each = cols == tensor.cols ? count : 1;  // rows without a gap in the file
    for (int64_t r = 0; r < count; r += each) {
      const int64_t first = (row + r) * tensor.cols + box.col_begin;
      const auto read = absl::MakeSpan(values).subspan(r * cols, each * cols);
      MOE_RETURN_IF_ERROR(
          found->whole.file->ReadFloat32(PartOf(found->tensor, first, {each * cols}), read));
      AddNoise(tensor, first, read);
    }
    MOE_RETURN_IF_ERROR(
        store.WriteMaster(parameter, values, stream, held.first + (row - box.row_begin) * cols));
  }
  return absl::OkStatus();
}

absl::StatusOr<bool> HfModel::Borrow(const ParameterStore& store, Parameter& parameter) const {
  std::vector<std::optional<BorrowedRows>> rows;
  for (const auto& [tensor, box, first] : BoxesOf(parameter)) {
    const Part* const found = Find(*tensor);
    if (found == nullptr || box.cols() != tensor->cols) return false;
    rows.push_back(RowsToBorrow(*found->whole.file,
                                PartOf(found->tensor, box.row_begin * box.cols(), {box.size()}),
                                store.compute()));
    // Passes of the model that save states need a parameter in one piece.
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
    for (const BoxInMemory& held : BoxesOf(*parameter)) {
      MOE_RETURN_IF_ERROR(LoadBox(held, *parameter, store, StreamOf(*parameter, context)));
    }
  }
  return context.compute->Synchronize();
}

}  // namespace moe::hf
