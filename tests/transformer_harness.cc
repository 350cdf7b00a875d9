#include "tests/transformer_harness.h"

#include <cmath>
#include <cstring>
#include <mutex>
#include <numeric>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "moe/gradient_reducer.h"
#include "moe/micro_batches.h"
#include "tests/local_ranks.h"

namespace moe::testing {
namespace {

void PrepareWeights(const ModelWork& work, Parameter& parameter) {
  const auto master = parameter.master();
  if (parameter.spec().initializer == Initializer::kOnes) {
    for (size_t h = 0; h < master.size(); ++h) {
      master[h] = 1.0f + 0.4f * std::sin(static_cast<float>(3 * h + parameter.spec().name.size()));
    }
  }
  if (!work.bfloat16_weights) return;
  for (float& v : master) v = static_cast<float>(BFloat16(v));
}

// One rank's part of the run.
template <typename T>
class RankRun {
 public:
  RankRun(const ModelWork& work, const Context& context, ModelResult& result, std::mutex& mu)
      : work_(work), context_(context), result_(result), mu_(mu), offsets_(work.TokenOffsets()) {}

  absl::Status Run(AllReduceAlgorithm algorithm, Stream& gradients) {
    ParameterStore store(DTypeOf<T>::value, /*seed=*/3);
    MOE_ASSIGN_OR_RETURN(const auto model,
                         lm::Transformer<T>::Create(work_.config, store, context_));
    for (const auto& p : store.parameters()) {
      PrepareWeights(work_, *p);
      MOE_RETURN_IF_ERROR(store.RefreshCompute(*p, *context_.compute));
    }
    const auto count = static_cast<int64_t>(work_.micro_batches.size());
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create({.bucket_bytes = 2048, .algorithm = algorithm, .max_terms = count},
                                store, context_, gradients));
    MOE_RETURN_IF_ERROR(reducer->Begin());
    Communicator& world = context_.mesh->world();
    const auto [begin, end] = MicroBatchesOf(world.rank(), world.size(), count);
    const int64_t rounds = RoundsOf(world.size(), count);
    for (int64_t round = 0; round < rounds; ++round) {
      MOE_RETURN_IF_ERROR(Round(*model, *reducer, begin + round < end ? begin + round : -1,
                                /*last=*/round == rounds - 1));
    }
    MOE_RETURN_IF_ERROR(reducer->Finish());
    EXPECT_EQ(context_.workspace->used_bytes(), 0);
    return Collect(store, *reducer);
  }

 private:
  // Forward and backward of one micro-batch, or of none (-1).
  absl::Status Round(lm::Transformer<T>& model, GradientReducer& reducer, int64_t micro_batch,
                     bool last) {
    const bool none = micro_batch < 0;
    const int64_t first = none ? 0 : offsets_[micro_batch];
    const int64_t tokens = none ? 0 : offsets_[micro_batch + 1] - first;
    const auto sequences =
        none ? std::vector<int64_t>{0} : work_.SequenceOffsets(static_cast<size_t>(micro_batch));
    const int64_t bounds[] = {0, tokens};
    const Batch batch = {.sequence_offsets = sequences,
                         .micro_batch_offsets = bounds,
                         .first_global_token = first,
                         .step = 1};
    std::vector<float> row_loss(tokens);
    lm::ForwardStats stats;
    std::vector<std::string> ready;
    MOE_RETURN_IF_ERROR(model.ForwardBackward(
        absl::MakeSpan(work_.tokens).subspan(first, tokens),
        absl::MakeSpan(work_.targets).subspan(first, tokens), batch, work_.loss_scale,
        absl::MakeSpan(row_loss), &stats, [&](Parameter& p) {
          ready.push_back(p.spec().name);
          return last ? reducer.MarkReady(p) : absl::OkStatus();
        }));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());

    const std::lock_guard<std::mutex> lock(mu_);
    const int rank = context_.mesh->world().rank();
    std::copy(row_loss.begin(), row_loss.end(), result_.row_loss.begin() + first);
    std::vector<std::string>& order = result_.ready[rank];
    order.insert(order.end(), ready.begin(), ready.end());
    if (rank == 0) result_.workspace_allocations.push_back(context_.workspace->allocations());
    EXPECT_EQ(stats.router.size(), static_cast<size_t>(model.moe_layers()));
    for (const RouterStats& layer : stats.router) {
      result_.aux_loss += layer.aux_loss;
      result_.z_loss += layer.z_loss;
    }
    return absl::OkStatus();
  }

  absl::Status Collect(const ParameterStore& store, const GradientReducer& reducer) {
    EXPECT_EQ(*reducer.NonFinite(ParameterGroup::kReplicated), 0);
    EXPECT_EQ(*reducer.NonFinite(ParameterGroup::kExpert), 0);
    for (const auto& p : store.parameters()) {
      if (!p->spec().trainable) continue;
      std::vector<float> scratch(p->size());
      MOE_ASSIGN_OR_RETURN(const auto gradient,
                           reducer.Gradient(*p, 1.0, absl::MakeSpan(scratch), *context_.compute));
      const std::vector<float> copy(gradient.begin(), gradient.end());
      const std::lock_guard<std::mutex> lock(mu_);
      const std::string& name = p->spec().name;
      const auto [at, fresh] = result_.gradients.emplace(name, copy);
      EXPECT_TRUE(fresh || std::memcmp(at->second.data(), copy.data(), copy.size() * 4) == 0)
          << name << ": replicas hold different gradients";
      result_.weights[name] = {
          p->spec().rows, p->spec().cols, {p->master().begin(), p->master().end()}};
    }
    return absl::OkStatus();
  }

  const ModelWork& work_;
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
  laid_out.config.moe.dispatcher = {.algorithm = layout.dispatch, .node_size = layout.node_size};
  laid_out.config.moe.overlap_degree = layout.overlap;
  RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session,
                         Session::Create({.expert_parallel_size = layout.expert_parallel,
                                          .threads = layout.threads,
                                          .numerics = numerics,
                                          .overlap_exchange = layout.overlap > 1},
                                         std::move(world)));
    RankRun<T> run(laid_out, session->context(), result, mu);
    return run.Run(layout.all_reduce, session->gradient_stream());
  });
  return result;
}

template ModelResult RunModel<float>(const ModelWork&, const Layout&, Numerics);
template ModelResult RunModel<BFloat16>(const ModelWork&, const Layout&, Numerics);

}  // namespace moe::testing
