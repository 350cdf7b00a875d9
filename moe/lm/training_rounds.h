// The rounds of a training step: which sequences a micro-batch has, and what is summed of it.
#ifndef MOE_MOE_LM_TRAINING_ROUNDS_H_
#define MOE_MOE_LM_TRAINING_ROUNDS_H_

#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/status.h>

#include "moe/lm/model.h"
#include "moe/lm/step_totals.h"
#include "moe/lm/text_data.h"
#include "moe/lm/train_config.h"
#include "moe/pipeline/runner.h"

namespace moe::lm {

// Borrows all; `routing`: nullptr if routing is not recorded.
template <typename T>
class TrainingRounds final : public RoundHost {
 public:
  TrainingRounds(const TrainConfig& config, const Tokens& text, Model<T>& model, StepTotals& totals,
                 RoutingRecorder* routing)
      : config_(config),
        text_(text),
        model_(model),
        totals_(totals),
        routing_(routing),
        sampler_(SequenceCount(text, config.sequence_length),
                 config.trainer.micro_batches * config.micro_batch_size, config.trainer.seed) {
    sequences_.reserve(config.micro_batch_size);
  }

  int64_t RowsOf(const Round& round) const override {
    return round.empty() ? 0 : config_.micro_batch_size * config_.sequence_length;
  }
  absl::Status BeginRound(const Round& round, int chunk, Pass& pass) override;
  absl::Status EndRound(const Round& round, int chunk, const Pass& pass) override;

 private:
  // A micro-batch in flight in one chunk.
  struct MicroBatch {
    SequenceBatch batch;
    std::vector<RouterStats> stats;  // [MoE layer of the model]: those of the chunk are filled in
  };

  const TrainConfig& config_;
  const Tokens& text_;
  Model<T>& model_;
  StepTotals& totals_;
  RoutingRecorder* const routing_;
  Sampler sampler_;
  std::vector<int64_t> sequences_;  // sequences of the micro-batch that was begun last
  PerStash<std::unique_ptr<MicroBatch>> micro_batches_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRAINING_ROUNDS_H_
