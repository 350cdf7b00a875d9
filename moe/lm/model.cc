#include "moe/lm/model.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"

namespace moe::lm {
namespace {

int MixturesBefore(const TransformerConfig& config, int layer) {
  return layer / config.moe_layer_freq;
}

LayerRange LayersOf(const TransformerConfig& config, int part, int parts) {
  return {config.first_layer(part, parts), config.first_layer(part + 1, parts)};
}

absl::Status CheckParts(const TransformerConfig& config, const PipelineShape& shape) {
  if (config.num_layers < shape.parts()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Transformer: ", config.num_layers, " layers in ", shape.stages, " pipeline stages of ",
        shape.chunks, " chunks, expected at least ", shape.parts()));
  }
  return CheckPipelineLayout(config, shape.parts());
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Model<T>>> Model<T>::Create(const TransformerConfig& config,
                                                           const PipelineShape& shape,
                                                           ParameterStore& store,
                                                           const Context& context) {
  MOE_RETURN_IF_ERROR(ValidateTransformerConfig(config));
  MOE_RETURN_IF_ERROR(CheckParts(config, shape));
  const int stage = context.mesh->index(MeshGroup::kPipeline);
  if (config.tied_embeddings && shape.stages > 1) {
    MOE_RETURN_IF_ERROR(context.mesh->Open(MeshGroup::kEnds, MeshLane::kGradients));
  }
  auto model = std::unique_ptr<Model>(new Model);
  for (int part = 0; part < shape.parts(); ++part) {
    const LayerRange range = LayersOf(config, part, shape.parts());
    const int mixtures = MixturesBefore(config, range.last) - MixturesBefore(config, range.first);
    model->stage_of_.insert(model->stage_of_.end(), mixtures, part % shape.stages);
  }
  for (int c = 0; c < shape.chunks; ++c) {
    const LayerRange range = LayersOf(config, shape.PartOf(stage, c), shape.parts());
    store.set_chunk(c);
    MOE_ASSIGN_OR_RETURN(auto created, Stage<T>::Create(config, range, store, context));
    model->first_mixture_.push_back(MixturesBefore(config, range.first));
    model->pipeline_.chunks.push_back(created.get());
    model->chunks_.push_back(std::move(created));
  }
  model->pipeline_.hidden_size = config.hidden_size;
  model->expert_load_.assign(model->stage_of_.size(),
                             std::vector<int64_t>(config.moe.router.num_outputs(), 0));
  return model;
}

template <typename T>
std::vector<ModuleState> Model<T>::states() {
  std::vector<ModuleState> states;
  for (const auto& chunk : chunks_) {
    for (MoeLayer<T>* const layer : chunk->mixtures()) states.push_back(layer->router_share());
  }
  return states;
}

template <typename T>
int64_t Model<T>::count_size() const {
  return expert_load_.empty() ? 0 : std::ssize(expert_load_) * std::ssize(expert_load_.front());
}

template <typename T>
absl::Status Model<T>::TakeCounts(absl::Span<int64_t> counts) {
  std::fill(counts.begin(), counts.end(), 0);
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const std::vector<int64_t>& taken = chunks_[c]->counts();
    if (taken.empty()) continue;
    std::copy(taken.begin(), taken.end(),
              counts.begin() + first_mixture_[c] * std::ssize(expert_load_.front()));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Model<T>::EndStep(absl::Span<const int64_t> counts) {
  for (std::vector<int64_t>& load : expert_load_) {
    std::copy_n(counts.begin(), load.size(), load.begin());
    counts.remove_prefix(load.size());
  }
  for (size_t c = 0; c < chunks_.size(); ++c) {
    auto load = expert_load_.begin() + first_mixture_[c];
    for (MoeLayer<T>* const layer : chunks_[c]->mixtures()) {
      MOE_RETURN_IF_ERROR(layer->EndStep(*load++));
    }
    chunks_[c]->ForgetCounts();
  }
  return absl::OkStatus();
}

template <typename T>
void Model<T>::CountSlots(absl::Span<int64_t> slots) {
  const size_t experts = stage_of_.empty() ? 0 : slots.size() / stage_of_.size();
  for (size_t c = 0; c < chunks_.size(); ++c) {
    size_t layer = static_cast<size_t>(first_mixture_[c]);
    for (MoeLayer<T>* const mixture : chunks_[c]->mixtures()) {
      mixture->CountSlots(slots.subspan(experts * layer++, experts));
    }
  }
}

template <typename T>
ExchangeBytes Model<T>::exchange_bytes() const {
  ExchangeBytes total;
  for (const auto& chunk : chunks_) {
    for (MoeLayer<T>* const layer : chunk->mixtures()) {
      const ExchangeBytes& bytes = layer->exchange_bytes();
      total.self += bytes.self;
      total.same_node += bytes.same_node;
      total.cross_node += bytes.cross_node;
    }
  }
  return total;
}

template class Model<float>;
template class Model<BFloat16>;
template class Model<Float16>;

}  // namespace moe::lm
