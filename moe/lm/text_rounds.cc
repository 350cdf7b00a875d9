#include "moe/lm/text_rounds.h"

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/tensor/own_rows.h"

namespace moe::lm {

template <typename T>
absl::Status TextRounds<T>::BeginRound(const Round& round, int chunk, Pass& pass) {
  pass.context.mesh->world().Mark({.name = "data", .step = round.step()});
  std::unique_ptr<MicroBatch>& micro_batch = micro_batches_.Begin(pass.stash);
  if (micro_batch == nullptr) {
    micro_batch.reset(new MicroBatch{{config_.sequence_length, config_.micro_batch_size,
                                      config_.documents, config_.model.eos_token_ids},
                                     std::vector<RouterStats>(model_.moe_layers())});
  }
  SequenceBatch& batch = micro_batch->batch;
  const int64_t first = round.empty() ? 0 : round.micro_batch() * config_.micro_batch_size;
  sequences_.clear();
  for (int64_t i = 0; i < Sequences(round); ++i) {
    sequences_.push_back(sampler_ ? sampler_->At(round.step() - 1, first + i) : first + i);
  }
  batch.Load(text_, sequences_, first);
  pass.batch = batch.batch(round.step(), sampler_ ? Mode::kTraining : Mode::kEvaluation);
  pass.router_stats = model_.OfChunk(chunk, micro_batch->stats);
  return model_.chunk(chunk).Load(
      pass, {batch.tokens(), batch.targets(), batch.row_loss(), batch.loss_rows()});
}

template <typename T>
absl::Status TextRounds<T>::EndRound(const Round& round, int chunk, const Pass& pass) {
  Stage<T>& model = model_.chunk(chunk);
  MOE_RETURN_IF_ERROR(model.TakeLosses(pass));
  if (round.empty()) return absl::OkStatus();
  SequenceBatch& batch = (*micro_batches_.Find(pass.stash))->batch;
  const int64_t rows = OwnRowsOf(pass.context, batch.size()).count();
  if (model.has_losses()) totals_.AddLosses(model.own_losses(pass), rows);
  // Ranks of a tensor group have the same measures of routers.
  if (pass.context.mesh->index(MeshGroup::kTensor) == 0) totals_.AddRouters(pass.router_stats);
  if (routing_ != nullptr && chunk == 0) routing_->AddTokens(rows);
  return absl::OkStatus();
}

template class TextRounds<float>;
template class TextRounds<BFloat16>;
template class TextRounds<Float16>;

}  // namespace moe::lm
