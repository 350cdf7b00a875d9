#include "moe/hf/hf_weights.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"
#include "moe/io/bounded_json.h"

namespace moe::hf {
namespace {

std::string PrefixOf(absl::string_view root, int64_t layer) {
  return absl::StrCat(root, "layers.", layer, ".");
}

std::string RouterOf(const TensorLayout& layout, absl::string_view prefix) {
  return absl::StrCat(prefix, layout.block, ".", layout.tensors.front().name);
}

bool HasExperts(const HfConfig& config, int64_t layer) {
  return layer >= 0 && layer < config.num_layers() && config.has_experts[layer];
}

// Layers that have experts by the configuration and whose router is in the checkpoint, in any
// layout, below the first root that has any.
struct Layers {
  absl::string_view root = kRoots[0];
  std::vector<int64_t> available;
};
Layers FindLayers(const Checkpoint& checkpoint, const HfConfig& config) {
  const std::vector<TensorLayout> layouts = LayoutsOf(*config.family);
  for (const absl::string_view root : kRoots) {
    Layers layers = {.root = root};
    for (int64_t i = 0; i < config.num_layers(); ++i) {
      const bool there = config.has_experts[i] &&
                         std::any_of(layouts.begin(), layouts.end(), [&](const auto& layout) {
                           return checkpoint.Contains(RouterOf(layout, PrefixOf(root, i)));
                         });
      if (there) layers.available.push_back(i);
    }
    if (!layers.available.empty()) return layers;
  }
  return {};
}

absl::Status CheckLayer(const HfConfig& config, int64_t layer) {
  if (HasExperts(config, layer)) return absl::OkStatus();
  if (layer < 0 || layer >= config.num_layers()) {
    return absl::OutOfRangeError(
        absl::StrCat("layer ", layer, " does not exist, expected 0 to ", config.num_layers() - 1));
  }
  std::vector<int64_t> some;
  for (int64_t i = 0; i < config.num_layers() && some.size() < 8; ++i) {
    if (config.has_experts[i]) some.push_back(i);
  }
  return absl::OutOfRangeError(absl::StrCat(
      "layer ", layer, " is dense, expected one with experts: ",
      some.empty() ? "there is none" : absl::StrJoin(some, ", "), some.size() == 8 ? ", ..." : ""));
}

absl::Status Missing(const Checkpoint& checkpoint, const std::string& name) {
  if (checkpoint.Contains(name + "_blocks")) {
    return BadTensor(checkpoint.path(), name, "is there as MXFP4 alone (_blocks, _scales)",
                     absl::StrCat("it unpacked, as ", kReadableTypes));
  }
  return BadTensor(checkpoint.path(), name, "is missing", "it from the configuration");
}

std::string TextOf(absl::Span<const int64_t> shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// A parameter that tensors fill.
constexpr int32_t kOfNoExpert = -1;
struct Filled {
  int64_t size = 0;
  int32_t expert = kOfNoExpert;
};

}  // namespace

bool IsReadable(SafetensorsType type) {
  return type == SafetensorsType::kF32 || type == SafetensorsType::kF16 ||
         type == SafetensorsType::kBF16 || type == SafetensorsType::kF64;
}

absl::StatusOr<CheckpointTensor> FindTensor(Checkpoint& checkpoint, const std::string& name,
                                            absl::Span<const int64_t> shape) {
  absl::StatusOr<CheckpointTensor> found = checkpoint.Find(name);
  if (absl::IsNotFound(found.status()) && !checkpoint.Contains(name)) {
    return Missing(checkpoint, name);
  }
  MOE_RETURN_IF_ERROR(found.status());
  const SafetensorsTensor& tensor = *found->tensor;
  const std::string& file = found->file->path();
  if (!IsReadable(tensor.type)) {
    return BadTensor(file, name, absl::StrCat("is ", NameOf(tensor.type)), kReadableTypes);
  }
  if (tensor.shape != shape) {
    return BadTensor(file, name, absl::StrCat("has shape ", TextOf(tensor.shape)),
                     absl::StrCat(TextOf(shape), " from the configuration"));
  }
  return found;
}

SafetensorsTensor RowsOf(const SafetensorsTensor& tensor, int64_t first, int64_t count) {
  MOE_CHECK(!tensor.shape.empty() && first >= 0 && count >= 0 && first + count <= tensor.shape[0]);
  std::vector<int64_t> shape = tensor.shape;
  shape[0] = count;
  const int64_t row = tensor.num_elements / std::max<int64_t>(1, tensor.shape[0]);
  return PartOf(tensor, first * row, std::move(shape));
}

std::optional<BorrowedRows> RowsToBorrow(const SafetensorsFile& file, const SafetensorsTensor& part,
                                         DType type) {
  const absl::Span<const uint8_t> bytes = file.Data(part);
  const bool fits =
      part.type == (type == DType::kBFloat16 ? SafetensorsType::kBF16 : SafetensorsType::kF16) &&
      reinterpret_cast<uintptr_t>(bytes.data()) % sizeof(uint16_t) == 0;
  if (!fits) return std::nullopt;
  return BorrowedRows{.values = {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
                      .owner = file.mapping()};
}

absl::StatusOr<bool> BorrowIfWhole(const ParameterStore& store, Parameter& parameter,
                                   absl::Span<const std::optional<BorrowedRows>> rows) {
  if (!store.CanBorrow(parameter)) return false;
  std::vector<BorrowedRows> whole;
  int64_t bytes = 0;
  for (const auto& each : rows) {
    if (!each.has_value()) return false;
    bytes += std::ssize(each->values);
    if (!whole.empty() && whole.back().values.end() == each->values.begin()) {
      const absl::Span<const std::byte> before = whole.back().values;
      whole.back().values = {before.data(), before.size() + each->values.size()};
    } else {
      whole.push_back(*each);
    }
  }
  if (bytes != parameter.size() * SizeOf(store.compute())) return false;
  MOE_RETURN_IF_ERROR(store.Borrow(parameter, std::move(whole)));
  return true;
}

SafetensorsTensor PartOf(const SafetensorsTensor& tensor, int64_t first,
                         std::vector<int64_t> shape) {
  SafetensorsTensor part = tensor;
  part.num_elements = 1;
  for (const int64_t size : shape) part.num_elements *= size;
  MOE_CHECK(first >= 0 && first + part.num_elements <= tensor.num_elements);
  const int64_t element_bytes = tensor.size_bytes / std::max<int64_t>(1, tensor.num_elements);
  part.shape = std::move(shape);
  part.begin_bytes += first * element_bytes;
  part.size_bytes = part.num_elements * element_bytes;
  return part;
}

absl::StatusOr<LayerWeights> LayerWeights::Find(const HfConfig& config, Checkpoint checkpoint,
                                                std::optional<int64_t> layer) {
  return Find(config, std::make_shared<Checkpoint>(std::move(checkpoint)), layer);
}

absl::StatusOr<std::vector<LayerWeights>> LayerWeights::FindAll(const HfConfig& config,
                                                                Checkpoint checkpoint) {
  const auto shared = std::make_shared<Checkpoint>(std::move(checkpoint));
  std::vector<LayerWeights> all;
  for (int64_t layer = 0; layer < config.num_layers(); ++layer) {
    if (!config.has_experts[layer]) continue;
    MOE_ASSIGN_OR_RETURN(LayerWeights found, Find(config, shared, layer));
    all.push_back(std::move(found));
  }
  return all;
}

absl::StatusOr<LayerWeights> LayerWeights::Find(const HfConfig& config,
                                                std::shared_ptr<Checkpoint> checkpoint,
                                                std::optional<int64_t> layer) {
  if (layer.has_value()) MOE_RETURN_IF_ERROR(CheckLayer(config, *layer));
  LayerWeights weights(config, std::move(checkpoint));
  Layers layers = FindLayers(*weights.checkpoint_, config);
  weights.available_ = std::move(layers.available);
  if (!layer.has_value() && weights.available_.empty()) {
    return BadTensor(weights.path(),
                     RouterOf(LayoutsOf(*config.family).front(), PrefixOf(layers.root, 0)),
                     "is missing",
                     absl::StrCat("it in this or another layer to which ", config.model_type(),
                                  "'s configuration gives experts"));
  }
  weights.layer_ = layer.has_value() ? *layer : weights.available_.front();
  const std::string prefix = PrefixOf(layers.root, weights.layer_);
  MOE_ASSIGN_OR_RETURN(weights.layout_, FindLayout(*weights.checkpoint_, config, prefix));
  MOE_RETURN_IF_ERROR(weights.FindTensors(absl::StrCat(prefix, weights.layout_.block, ".")));
  return weights;
}

absl::Status LayerWeights::FindTensors(const std::string& prefix) {
  for (const TensorRule& rule : layout_.tensors) {
    if (!IsPresent(rule, config_.moe)) continue;
    const std::vector<int64_t> shape = TensorShape(rule, config_.moe);
    for (int32_t e = 0; e < TensorCount(rule, config_.moe); ++e) {
      const std::string name = prefix + TensorName(rule, e);
      MOE_ASSIGN_OR_RETURN(const CheckpointTensor found, FindTensor(*checkpoint_, name, shape));
      tensors_.push_back({.rule = &rule, .expert = e, .found = found});
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::map<std::string, Parameter*>> LayerWeights::ParametersToLoad(
    const ParameterStore& store, absl::string_view prefix) const {
  std::map<std::string, Filled> filled;
  for (const LayerTensor& tensor : tensors_) {
    const ParameterKind kind = tensor.rule->parameter;
    const bool stacked = tensor.rule->experts == ExpertAxis::kStacked;
    const bool of_expert = tensor.rule->experts != ExpertAxis::kNone;
    for (int32_t e = 0; e < (stacked ? config_.moe.router.num_experts : 1); ++e) {
      const int32_t expert = stacked ? e : tensor.expert;
      filled[ParameterName(kind, expert)] = {.size = ShapeOf(kind, config_.moe).size(),
                                             .expert = of_expert ? expert : kOfNoExpert};
    }
  }
  std::map<std::string, Parameter*> by_name;
  std::set<int32_t> experts = {kOfNoExpert};  // whose parameters must be in the store
  for (const auto& parameter : store.parameters()) {
    const std::string& name = parameter->spec().name;
    if (!absl::StartsWith(name, prefix)) continue;
    const auto found = filled.find(name.substr(prefix.size()));
    if (found == filled.end() || found->second.size != parameter->size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("LayerWeights::Load: parameter '", name, "' has ", parameter->size(),
                       " elements, expected ",
                       found == filled.end()
                           ? absl::StrCat("no such name in a layer with the prefix '", prefix, "'")
                           : absl::StrCat(found->second.size)));
    }
    by_name[found->first] = parameter.get();
    experts.insert(found->second.expert);
  }
  if (by_name.empty()) {
    return absl::NotFoundError(
        absl::StrCat("LayerWeights::Load: no parameter of the store starts with '", prefix,
                     "', expected a layer with that prefix"));
  }
  for (const auto& [name, parameter] : filled) {
    if (experts.count(parameter.expert) == 0 || by_name.count(name) != 0) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("LayerWeights::Load: parameter '", prefix, name,
                     "' is not in the store, expected all that the checkpoint's layer has"));
  }
  return by_name;
}

template <typename Visit>
absl::Status LayerWeights::ForEachPart(Visit visit) const {
  for (const LayerTensor& tensor : tensors_) {
    if (tensor.rule->experts != ExpertAxis::kStacked) {
      MOE_RETURN_IF_ERROR(visit(tensor, tensor.expert, *tensor.found.tensor));
      continue;
    }
    for (int32_t e = 0; e < config_.moe.router.num_experts; ++e) {
      MOE_RETURN_IF_ERROR(visit(tensor, e, RowsOf(*tensor.found.tensor, e, 1)));
    }
  }
  return absl::OkStatus();
}

absl::Status LayerWeights::Borrow(ParameterStore& store,
                                  std::map<std::string, Parameter*>& by_name) const {
  std::map<std::string, std::vector<std::optional<BorrowedRows>>> found;  // gate before up
  MOE_RETURN_IF_ERROR(ForEachPart([&](const LayerTensor& tensor, int32_t expert,
                                      const SafetensorsTensor& part) {
    const TensorRule& rule = *tensor.rule;
    const std::string name = ParameterName(rule.parameter, expert);
    if (by_name.count(name) == 0) return absl::OkStatus();
    auto& rows = found[name];
    const bool in_order = !rule.transposed && rule.rows != TensorRows::kInterleaved;
    rows.insert(rule.rows == TensorRows::kGate ? rows.begin() : rows.end(),
                in_order ? RowsToBorrow(*tensor.found.file, part, store.compute()) : std::nullopt);
    return absl::OkStatus();
  }));
  for (const auto& [name, rows] : found) {
    MOE_ASSIGN_OR_RETURN(const bool borrowed, BorrowIfWhole(store, *by_name.at(name), rows));
    if (borrowed) by_name.erase(name);
  }
  return absl::OkStatus();
}

absl::Status LayerWeights::Load(ParameterStore& store, Stream& stream, Stream& host,
                                absl::string_view prefix, LoadBy by) const {
  MOE_ASSIGN_OR_RETURN(auto by_name, ParametersToLoad(store, prefix));
  if (by == LoadBy::kBorrow) MOE_RETURN_IF_ERROR(Borrow(store, by_name));
  std::vector<float> scratch, values;
  // `part` of a tensor is all that the tensor holds of the parameter.
  const auto load = [&](const LayerTensor& tensor, int32_t expert,
                        const SafetensorsTensor& part) -> absl::Status {
    const auto found = by_name.find(ParameterName(tensor.rule->parameter, expert));
    // The expert belongs to another rank, or its values are borrowed.
    if (found == by_name.end()) return absl::OkStatus();
    scratch.resize(part.num_elements);
    MOE_RETURN_IF_ERROR(tensor.found.file->ReadFloat32(part, absl::MakeSpan(scratch)));
    Parameter& parameter = *found->second;
    values.resize(parameter.size());
    int64_t first = parameter.size(), last = -1;  // range of the parameter: half or all of it
    ForEachElement(*tensor.rule, config_.moe, [&](int64_t i, int64_t j) {
      values[i] = scratch[j];
      first = std::min(first, i);
      last = std::max(last, i);
    });
    return store.WriteMaster(parameter,
                             absl::MakeConstSpan(values).subspan(first, last + 1 - first),
                             parameter.spec().host_state ? host : stream, first);
  };
  MOE_RETURN_IF_ERROR(ForEachPart(load));
  MOE_RETURN_IF_ERROR(host.Synchronize());
  return stream.Synchronize();
}

}  // namespace moe::hf
