// The reference model: a decoder-only transformer with mixture-of-experts layers, or the part of it
// that a rank of a pipeline holds.
#ifndef MOE_MOE_LM_MODEL_H_
#define MOE_MOE_LM_MODEL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/stage.h"
#include "moe/pipeline/runner.h"
#include "moe/pipeline/schedule.h"
#include "moe/state/module.h"

namespace moe::lm {

// The chunks of this rank's stage: part i of P has layers [first_layer(i, P), first_layer(i + 1,
// P)), the first part the embedding, too, and the last one the output layer. Where these are tied,
// both hold the table, and the ranks of both sum its gradient (MeshGroup::kEnds).
template <typename T>
class Model final : public TrainedModule {
 public:
  // Collective over the world. kInvalidArgument for fewer layers than parts; errors of
  // Stage::Create.
  static absl::StatusOr<std::unique_ptr<Model>> Create(const TransformerConfig& config,
                                                       const PipelineShape& shape,
                                                       ParameterStore& store,
                                                       const Context& context);

  // For Trainer::RunRounds.
  const PipelineModel<T>& pipeline() const { return pipeline_; }
  Stage<T>& chunk(int chunk) { return *chunks_[static_cast<size_t>(chunk)]; }
  int chunks() const { return static_cast<int>(chunks_.size()); }

  // The stage of each MoE layer of the model.
  absl::Span<const int> stage_of() const { return stage_of_; }
  // MoE layers of the whole model; those of a chunk are `of_chunk` of statistics that have an
  // entry for each.
  int moe_layers() const { return static_cast<int>(stage_of_.size()); }
  template <typename S>
  absl::Span<S> OfChunk(int chunk, std::vector<S>& of_layers) const {
    return absl::MakeSpan(of_layers).subspan(static_cast<size_t>(first_mixture_[chunk]),
                                             static_cast<size_t>(chunks_[chunk]->moe_layers()));
  }

  // MoeLayer::router_share of this rank's MoE layers.
  std::vector<ModuleState> states() override;
  // Slots [MoE layer of the model][E] chosen by the routers; EndStep passes them to
  // MoeLayer::EndStep.
  int64_t count_size() const override;
  absl::Status TakeCounts(absl::Span<int64_t> counts) override;
  absl::Status EndStep(absl::Span<const int64_t> counts) override;
  // [MoE layer of the model][E]: the counts of the last EndStep, identity experts last.
  const std::vector<std::vector<int64_t>>& expert_load() const { return expert_load_; }

  // MoeLayer::CountSlots for every MoE layer: slots [MoE layer of the model][E], borrowed; empty =
  // no longer.
  void CountSlots(absl::Span<int64_t> slots);

  // Sum over this rank's MoE layers.
  ExchangeBytes exchange_bytes() const;

 private:
  Model() = default;

  std::vector<std::unique_ptr<Stage<T>>> chunks_;
  std::vector<int> first_mixture_;  // by chunk: its first MoE layer among the model's
  PipelineModel<T> pipeline_;
  std::vector<int> stage_of_;
  std::vector<std::vector<int64_t>> expert_load_;  // loads of the last step, over all ranks
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_MODEL_H_
