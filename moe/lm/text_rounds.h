// The rounds of a step or an evaluation: which sequences a micro-batch has, and what is summed of
// it.
#ifndef MOE_MOE_LM_TEXT_ROUNDS_H_
#define MOE_MOE_LM_TEXT_ROUNDS_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/status.h>

#include "moe/lm/model.h"
#include "moe/lm/step_totals.h"
#include "moe/lm/text_data.h"
#include "moe/lm/train_config.h"
#include "moe/pipeline/runner.h"

namespace moe::lm {

// Borrows all.
template <typename T>
class TextRounds final : public RoundHost {
 public:
  // Of steps, with sequences that a Sampler draws. routing: nullptr if it is not recorded.
  TextRounds(const TrainConfig& config, const Tokens& text, Model<T>& model, StepTotals& totals,
             RoutingRecorder* routing)
      : TextRounds(config, text, config.trainer.micro_batches * config.micro_batch_size, model,
                   totals) {
    routing_ = routing;
    sampler_.emplace(SequenceCount(text, config.sequence_length), count_, config.trainer.seed);
  }
  // Of an evaluation: sequences [0, count).
  TextRounds(const TrainConfig& config, const Tokens& text, int64_t count, Model<T>& model,
             StepTotals& totals)
      : config_(config), text_(text), count_(count), model_(model), totals_(totals) {
    sequences_.reserve(config.micro_batch_size);
  }

  int64_t RowsOf(const Round& round) const override {
    return Sequences(round) * config_.sequence_length;
  }
  absl::Status BeginRound(const Round& round, int chunk, Pass& pass) override;
  absl::Status EndRound(const Round& round, int chunk, const Pass& pass) override;

 private:
  // A micro-batch in flight in one chunk.
  struct MicroBatch {
    SequenceBatch batch;
    std::vector<RouterStats> stats;  // [MoE layer of the model]: those of the chunk are filled in
  };

  // The last micro-batch of an evaluation may have fewer.
  int64_t Sequences(const Round& round) const {
    const int64_t most = config_.micro_batch_size;
    return round.empty() ? 0 : std::min(most, count_ - round.micro_batch() * most);
  }

  const TrainConfig& config_;
  const Tokens& text_;
  const int64_t count_;  // sequences of all rounds on all ranks
  Model<T>& model_;
  StepTotals& totals_;
  RoutingRecorder* routing_ = nullptr;
  std::optional<Sampler> sampler_;  // nullopt: an evaluation
  std::vector<int64_t> sequences_;  // sequences of the micro-batch that was begun last
  PerStash<std::unique_ptr<MicroBatch>> micro_batches_;
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TEXT_ROUNDS_H_
