#include "tests/layer_harness.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <numeric>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "moe/gradient_reducer.h"
#include "tests/local_ranks.h"

namespace moe::testing {
namespace {

template <typename T>
std::vector<T> Convert(absl::Span<const float> in) {
  std::vector<T> out(in.size());
  std::transform(in.begin(), in.end(), out.begin(), [](float v) { return T(v); });
  return out;
}

// One rank's part of the run.
template <typename T>
class RankRun {
 public:
  RankRun(const LayerWork& work, const Context& context, LayerResult& result, std::mutex& mu)
      : work_(work), context_(context), result_(result), mu_(mu), offsets_{0} {
    for (const int64_t n : work.micro_batch_tokens) offsets_.push_back(offsets_.back() + n);
  }

  absl::Status Run(AllReduceAlgorithm algorithm, Stream& gradients) {
    ParameterStore store(DTypeOf<T>::value, work_.seed);
    MOE_ASSIGN_OR_RETURN(const auto layer,
                         MoeLayer<T>::Create(work_.config, "mlp.", store, context_));
    for (const auto& p : store.parameters()) {
      work_.override_parameter(*p);
      MOE_RETURN_IF_ERROR(store.RefreshCompute(*p, *context_.compute));
    }
    if (!work_.last_step_count.empty()) {
      MOE_RETURN_IF_ERROR(layer->EndStep(work_.last_step_count));
    }
    const int64_t micro_batches = static_cast<int64_t>(work_.micro_batch_tokens.size());
    MOE_ASSIGN_OR_RETURN(
        const auto reducer,
        GradientReducer::Create({.algorithm = algorithm, .grid = {.max_terms = micro_batches}},
                                store, context_, gradients));
    MOE_RETURN_IF_ERROR(reducer->Begin());
    Communicator& world = context_.mesh->world();
    const int64_t begin = micro_batches * world.rank() / world.size();
    const int64_t end = micro_batches * (world.rank() + 1) / world.size();
    const int64_t rounds = (micro_batches + world.size() - 1) / world.size();
    for (int64_t round = 0; round < rounds; ++round) {
      const bool last = round == rounds - 1;
      MOE_RETURN_IF_ERROR(
          Round(*layer, begin + round < end ? begin + round : -1,
                [&](Parameter& p) { return last ? reducer->MarkReady(p) : absl::OkStatus(); }));
    }
    MOE_RETURN_IF_ERROR(reducer->Finish());
    return Collect(store, *reducer);
  }

 private:
  // Forward and backward of one micro-batch, or of none (-1).
  absl::Status Round(MoeLayer<T>& layer, int64_t micro_batch, GradientReady ready) {
    const WorkspaceScope scope(*context_.workspace);
    const int64_t hidden = work_.config.router.hidden_size;
    const int64_t first = micro_batch < 0 ? 0 : offsets_[micro_batch];
    const int64_t tokens = micro_batch < 0 ? 0 : work_.micro_batch_tokens[micro_batch];
    auto x = Convert<T>(absl::MakeSpan(work_.x).subspan(first * hidden, tokens * hidden));
    auto dy = Convert<T>(absl::MakeSpan(work_.dy).subspan(first * hidden, tokens * hidden));
    std::vector<T> y(x.size()), dx(x.size());
    const int64_t bounds[] = {0, tokens};
    const Batch batch = {
        .sequence_offsets = bounds, .micro_batch_offsets = bounds, .first_global_token = first};
    MoeLayerSaved<T> saved;
    RouterStats stats;
    const auto view = [&](std::vector<T>& v) {
      return MatrixView<T>(v.data(), tokens, hidden);
    };
    MOE_RETURN_IF_ERROR(layer.Forward(view(x), batch, view(y), &saved, &stats));
    MOE_RETURN_IF_ERROR(layer.Backward(view(dy), saved, 1.0f, view(dx), ready));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());

    const std::lock_guard<std::mutex> lock(mu_);
    std::transform(y.begin(), y.end(), result_.y.begin() + first * hidden,
                   [](T v) { return static_cast<float>(v); });
    std::transform(dx.begin(), dx.end(), result_.dx.begin() + first * hidden,
                   [](T v) { return static_cast<float>(v); });
    if (tokens == 0) return absl::OkStatus();
    for (size_t e = 0; e < stats.expert_count.size(); ++e) {
      result_.expert_count[e] += stats.expert_count[e];
    }
    result_.dropped_slots += stats.dropped_slots;
    result_.aux_loss += stats.aux_loss;
    result_.z_loss += stats.z_loss;
    return absl::OkStatus();
  }

  absl::Status Collect(const ParameterStore& store, const GradientReducer& reducer) {
    for (const auto& p : store.parameters()) {
      {
        const std::lock_guard<std::mutex> lock(mu_);
        result_.weights[p->spec().name] = {p->master().begin(), p->master().end()};
      }
      if (!p->spec().trainable) continue;
      std::vector<float> scratch(p->size());
      MOE_ASSIGN_OR_RETURN(const auto gradient,
                           reducer.Gradient(*p, 1.0, absl::MakeSpan(scratch), *context_.compute));
      std::vector<float> copy(gradient.begin(), gradient.end());
      const std::lock_guard<std::mutex> lock(mu_);
      const std::string& name = p->spec().name;
      const auto [at, fresh] = result_.gradients.emplace(name, copy);
      EXPECT_TRUE(fresh || std::memcmp(at->second.data(), copy.data(), copy.size() * 4) == 0)
          << name << ": replicas hold different gradients";
    }
    return absl::OkStatus();
  }

  const LayerWork& work_;
  const Context& context_;
  LayerResult& result_;
  std::mutex& mu_;
  std::vector<int64_t> offsets_;
};

void ExpectBits(const std::string& name, absl::Span<const float> got,
                absl::Span<const float> expected) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &expected[i], sizeof(float)), 0)
        << name << "[" << i << "]: " << got[i] << ", expected " << expected[i];
  }
}

}  // namespace

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  constexpr const char* kDispatch[] = {"staged", "direct", "hierarchical"};
  return out << "ranks " << layout.ranks << " ep " << layout.expert_parallel << " "
             << kDispatch[static_cast<int>(layout.dispatch)] << " node " << layout.node_size
             << " overlap " << layout.overlap << " threads " << layout.threads;
}

int64_t LayerWork::tokens() const {
  return std::accumulate(micro_batch_tokens.begin(), micro_batch_tokens.end(), int64_t{0});
}

LayerWork MakeWork(const MoeLayerConfig& config, std::vector<int64_t> micro_batch_tokens) {
  LayerWork work = {.config = config, .micro_batch_tokens = std::move(micro_batch_tokens)};
  const int64_t elements = work.tokens() * config.router.hidden_size;
  RandomKey key = {.seed = 11, .purpose = RandomPurpose::kData};
  for (int64_t i = 0; i < elements; ++i) {
    key.item = static_cast<uint64_t>(i);
    work.x.push_back(static_cast<float>(Normal(key, 0)));
    work.dy.push_back(static_cast<float>(Normal(key, 1)));
  }
  return work;
}

template <typename T>
LayerResult RunLayer(const LayerWork& work, const Layout& layout, Numerics numerics) {
  LayerResult result;
  result.y.resize(work.x.size());
  result.dx.resize(work.x.size());
  result.expert_count.resize(work.config.router.num_outputs());
  std::mutex mu;
  LayerWork laid_out = work;
  laid_out.config.dispatcher = {.algorithm = layout.dispatch, .node_size = layout.node_size};
  laid_out.config.overlap_degree = layout.overlap;
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

template LayerResult RunLayer<float>(const LayerWork&, const Layout&, Numerics);
template LayerResult RunLayer<BFloat16>(const LayerWork&, const Layout&, Numerics);

void ExpectSameBits(const LayerResult& got, const LayerResult& expected) {
  ExpectBits("y", got.y, expected.y);
  ExpectBits("dx", got.dx, expected.dx);
  ASSERT_EQ(got.gradients.size(), expected.gradients.size());
  for (const auto& [name, gradient] : expected.gradients) {
    ASSERT_TRUE(got.gradients.contains(name)) << name;
    ExpectBits(name, got.gradients.at(name), gradient);
  }
  EXPECT_EQ(got.expert_count, expected.expert_count);
  EXPECT_EQ(got.dropped_slots, expected.dropped_slots);
}

}  // namespace moe::testing
