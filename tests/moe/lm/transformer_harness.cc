#include "tests/moe/lm/transformer_harness.h"

#include <cmath>
#include <numeric>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"

namespace moe::testing {
namespace {

void PrepareWeights(const ModelWork& work, Parameter& parameter) {
  const auto master = parameter.master();
  if (parameter.spec().initializer != Initializer::kNormal) {
    for (size_t h = 0; h < master.size(); ++h) {
      master[h] += 0.4f * std::sin(static_cast<float>(3 * h + parameter.spec().name.size()));
    }
  }
  if (!work.bfloat16_weights) return;
  for (float& v : master) v = static_cast<float>(BFloat16(v));
}

// One rank's part of the run.
template <typename T>
class RankRun {
 public:
  RankRun(const ModelWork& work, Trainer& trainer, ModelResult& result, std::mutex& mu)
      : work_(work),
        trainer_(trainer),
        context_(trainer.context()),
        result_(result),
        mu_(mu),
        offsets_(work.TokenOffsets()) {}

  absl::Status Run() {
    ParameterStore& store = trainer_.parameters();
    MOE_ASSIGN_OR_RETURN(const auto model, lm::Stage<T>::Create(work_.config, store, context_));
    for (const auto& p : store.parameters()) {
      PrepareWeights(work_, *p);
      MOE_RETURN_IF_ERROR(store.RefreshCompute(*p, *context_.compute));
    }
    for (int64_t r = 0; r < trainer_.rounds(); ++r) MOE_RETURN_IF_ERROR(RunRound(*model));
    MOE_RETURN_IF_ERROR(trainer_.Reduce());
    EXPECT_EQ(context_.workspace->used_bytes(), 0);
    EXPECT_TRUE(trainer_.MeasureGradients()->finite());
    MOE_RETURN_IF_ERROR(CollectGradients(trainer_, mu_, result_.gradients));
    const std::lock_guard<std::mutex> lock(mu_);
    for (const auto& p : store.parameters()) {
      if (!p->spec().trainable) continue;
      result_.weights[p->spec().name] = {
          p->spec().rows, p->spec().cols, {p->master().begin(), p->master().end()}};
    }
    return trainer_.EndStep();
  }

 private:
  // Forward and backward of one micro-batch, or of none.
  absl::Status RunRound(lm::Stage<T>& model) {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
    const auto b = static_cast<size_t>(round.micro_batch());
    const int64_t first = round.empty() ? 0 : offsets_[b];
    const int64_t tokens = round.empty() ? 0 : offsets_[b + 1] - first;
    const auto sequences = round.empty() ? std::vector<int64_t>{0} : work_.SequenceOffsets(b);
    const int64_t bounds[] = {0, tokens};
    Pass pass = trainer_.PassOf(round, {.sequence_offsets = sequences,
                                        .micro_batch_offsets = bounds,
                                        .first_global_token = first,
                                        .step = 1});
    pass.d_loss = work_.loss_scale;
    std::vector<float> row_loss(tokens);
    std::vector<RouterStats> stats(model.moe_layers());
    pass.router_stats = absl::MakeSpan(stats);
    std::vector<std::string> ready;
    MOE_RETURN_IF_ERROR(
        RunPasses(model, pass,
                  {absl::MakeSpan(work_.tokens).subspan(first, tokens),
                   absl::MakeSpan(work_.targets).subspan(first, tokens), absl::MakeSpan(row_loss)},
                  [&](Parameter& p) {
                    ready.push_back(p.spec().name);
                    return trainer_.MarkReady(round, p);
                  }));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());

    const std::lock_guard<std::mutex> lock(mu_);
    const int rank = context_.mesh->world().rank();
    std::copy(row_loss.begin(), row_loss.end(), result_.row_loss.begin() + first);
    std::vector<std::string>& order = result_.ready[rank];
    order.insert(order.end(), ready.begin(), ready.end());
    for (const RouterStats& layer : stats) {
      result_.aux_loss += layer.aux_loss;
      result_.z_loss += layer.z_loss;
    }
    return absl::OkStatus();
  }

  const ModelWork& work_;
  Trainer& trainer_;
  const Context& context_;
  ModelResult& result_;
  std::mutex& mu_;
  const std::vector<int64_t> offsets_;
};

}  // namespace

std::vector<int64_t> ModelWork::TokenOffsets() const {
  std::vector<int64_t> offsets = {0};
  for (const auto& lengths : micro_batches) {
    offsets.push_back(std::accumulate(lengths.begin(), lengths.end(), offsets.back()));
  }
  return offsets;
}

std::vector<int64_t> ModelWork::SequenceOffsets(size_t micro_batch) const {
  std::vector<int64_t> offsets = {0};
  for (const int64_t length : micro_batches[micro_batch]) {
    offsets.push_back(offsets.back() + length);
  }
  return offsets;
}

ModelWork MakeModelWork(const lm::TransformerConfig& config,
                        std::vector<std::vector<int64_t>> micro_batches) {
  ModelWork work = {.config = config, .micro_batches = std::move(micro_batches)};
  RandomKey key = {.seed = 17, .purpose = RandomPurpose::kData};
  const auto id = [&](uint32_t index) {
    return static_cast<int32_t>(Uniform(key, index) * static_cast<double>(config.vocab_size));
  };
  for (int64_t t = 0; t < work.TokenOffsets().back(); ++t) {
    key.item = static_cast<uint64_t>(t);
    work.tokens.push_back(id(0));
    work.targets.push_back(id(1));
  }
  return work;
}

template <typename T>
ModelResult RunModel(const ModelWork& work, const Layout& layout, Numerics numerics) {
  ModelResult result;
  result.row_loss.resize(work.tokens.size());
  result.ready.resize(layout.ranks);
  std::mutex mu;
  ModelWork laid_out = work;
  laid_out.config.moe = LaidOut(work.config.moe, layout);
  RunTrainers(layout,
              {.session = {.numerics = numerics},
               .dtype = DTypeOf<T>::value,
               .seed = 3,
               .micro_batches = static_cast<int64_t>(work.micro_batches.size()),
               .bucket_bytes = 2048},
              [&](Trainer& trainer) { return RankRun<T>(laid_out, trainer, result, mu).Run(); });
  return result;
}

template ModelResult RunModel<float>(const ModelWork&, const Layout&, Numerics);
template ModelResult RunModel<BFloat16>(const ModelWork&, const Layout&, Numerics);

}  // namespace moe::testing
