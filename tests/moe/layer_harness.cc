#include "tests/moe/layer_harness.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>

#include <gtest/gtest.h>

#include "kernels/base/rng.h"
#include "tests/comm/local_ranks.h"

namespace moe::testing {
namespace {

template <typename T>
std::vector<T> Convert(absl::Span<const float> in) {
  std::vector<T> out(in.size());
  std::transform(in.begin(), in.end(), out.begin(), [](float v) { return T(v); });
  return out;
}

template <typename T>
absl::StatusOr<std::vector<T>> FromDevice(const Buffer& buffer, const Context& context) {
  std::vector<T> values(buffer.bytes() / sizeof(T));
  MOE_RETURN_IF_ERROR(context.compute->CopyBytes(buffer.data(), values.data(), buffer.bytes()));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  return values;
}

// One rank's part of the run.
template <typename T>
class RankRun {
 public:
  RankRun(const LayerWork& work, Trainer& trainer, LayerResult& result, std::mutex& mu)
      : work_(work),
        trainer_(trainer),
        context_(trainer.context()),
        result_(result),
        mu_(mu),
        offsets_{0} {
    for (const int64_t n : work.micro_batch_tokens) offsets_.push_back(offsets_.back() + n);
  }

  absl::Status Run() {
    MOE_ASSIGN_OR_RETURN(layer_, trainer_.AddMoeLayer<T>("mlp.", work_.config));
    ParameterStore& store = trainer_.parameters();
    for (const auto& p : store.parameters()) MOE_RETURN_IF_ERROR(Override(*p, store));
    if (!work_.last_step_count.empty()) {
      MOE_RETURN_IF_ERROR(layer_->layer().EndStep(work_.last_step_count));
    }
    for (int64_t r = 0; r < trainer_.rounds(); ++r) MOE_RETURN_IF_ERROR(RunRound());
    MOE_RETURN_IF_ERROR(trainer_.Reduce());
    for (const auto& p : store.parameters()) {
      MOE_ASSIGN_OR_RETURN(std::vector<float> weights, p->ReadMaster(*context_.compute));
      const std::lock_guard<std::mutex> lock(mu_);
      result_.weights[p->spec().name] = std::move(weights);
    }
    MOE_RETURN_IF_ERROR(CollectGradients(trainer_, mu_, result_.gradients));
    return trainer_.EndStep();
  }

 private:
  // Forward and backward of one micro-batch, or of none.
  absl::Status RunRound() {
    MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
    const int64_t hidden = work_.config.router.hidden_size;
    const int64_t first = round.empty() ? 0 : offsets_[round.micro_batch()];
    const int64_t tokens = round.empty() ? 0 : work_.micro_batch_tokens[round.micro_batch()];
    const auto part = [&](const std::vector<float>& all) {
      return OnDevice(Convert<T>(absl::MakeSpan(all).subspan(first * hidden, tokens * hidden)));
    };
    MOE_ASSIGN_OR_RETURN(const Buffer x, part(work_.x));
    MOE_ASSIGN_OR_RETURN(const Buffer dy, part(work_.dy));
    MOE_ASSIGN_OR_RETURN(const Buffer y, Buffer::Allocate(x.bytes(), *context_.memory));
    MOE_ASSIGN_OR_RETURN(const Buffer dx, Buffer::Allocate(x.bytes(), *context_.memory));
    const int64_t bounds[] = {0, tokens};
    const Batch batch = {
        .sequence_offsets = bounds, .micro_batch_offsets = bounds, .first_global_token = first};
    const auto view = [&](const Buffer& v) {
      return MatrixView<T>(v.template span<T>().data(), tokens, hidden);
    };
    MOE_RETURN_IF_ERROR(layer_->Forward(round, view(x), view(y), batch));
    MOE_RETURN_IF_ERROR(layer_->Backward(round, view(dy), view(dx)));
    MOE_ASSIGN_OR_RETURN(const std::vector<T> host_y, FromDevice<T>(y, context_));
    MOE_ASSIGN_OR_RETURN(const std::vector<T> host_dx, FromDevice<T>(dx, context_));

    const std::lock_guard<std::mutex> lock(mu_);
    const auto put = [&](const std::vector<T>& from, std::vector<float>& to) {
      std::transform(from.begin(), from.end(), to.begin() + first * hidden,
                     [](T v) { return static_cast<float>(v); });
    };
    put(host_y, result_.y);
    put(host_dx, result_.dx);
    if (tokens == 0) return absl::OkStatus();
    const RouterStats& stats = layer_->stats();
    for (size_t e = 0; e < stats.expert_count.size(); ++e) {
      result_.expert_count[e] += stats.expert_count[e];
    }
    result_.dropped_slots += stats.dropped_slots;
    result_.aux_loss += stats.aux_loss;
    result_.z_loss += stats.z_loss;
    return absl::OkStatus();
  }

  absl::Status Override(Parameter& parameter, const ParameterStore& store) {
    Stream& stream = parameter.spec().trainable ? *context_.compute : *context_.host;
    MOE_ASSIGN_OR_RETURN(std::vector<float> values, parameter.ReadMaster(stream));
    work_.override_parameter(parameter.spec(), absl::MakeSpan(values));
    MOE_RETURN_IF_ERROR(stream.Upload(values.data(), parameter.master().data(),
                                      static_cast<int64_t>(values.size() * sizeof(float))));
    return parameter.spec().trainable ? store.RefreshCompute(parameter, stream) : absl::OkStatus();
  }

  absl::StatusOr<Buffer> OnDevice(const std::vector<T>& values) {
    const auto bytes = static_cast<int64_t>(values.size() * sizeof(T));
    MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate(bytes, *context_.memory));
    MOE_RETURN_IF_ERROR(context_.compute->Upload(values.data(), buffer.data(), bytes));
    return buffer;
  }

  const LayerWork& work_;
  Trainer& trainer_;
  const Context& context_;
  TrainedLayer<T>* layer_ = nullptr;
  LayerResult& result_;
  std::mutex& mu_;
  std::vector<int64_t> offsets_;
};

}  // namespace

std::ostream& operator<<(std::ostream& out, const Layout& layout) {
  constexpr const char* kDispatch[] = {"staged", "direct", "hierarchical"};
  return out << "ranks " << layout.ranks << " ep " << layout.expert_parallel << " "
             << kDispatch[static_cast<int>(layout.dispatch)] << " node " << layout.node_size
             << " overlap " << layout.overlap << " threads " << layout.threads;
}

MoeLayerConfig LaidOut(MoeLayerConfig config, const Layout& layout) {
  config.dispatcher = {.algorithm = layout.dispatch, .node_size = layout.node_size};
  config.overlap_degree = layout.overlap;
  return config;
}

DeviceKind LayerDevice() {
  const char* const device = std::getenv("MOE_TEST_DEVICE");
  const bool cuda = device != nullptr && absl::string_view(device) == "cuda";
  return cuda ? DeviceKind::kCuda : DeviceKind::kCpu;
}

void RunTrainers(const Layout& layout, const TrainerOptions& options,
                 absl::FunctionRef<absl::Status(Trainer&)> body) {
  RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    TrainerOptions mine = options;
    MOE_ASSIGN_OR_RETURN(mine.session.device, DeviceOfRank(LayerDevice(), *world));
    mine.session.expert_parallel_size = layout.expert_parallel;
    mine.session.threads = layout.threads;
    mine.session.overlap_exchange = layout.overlap > 1;
    mine.all_reduce = layout.all_reduce;
    MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(mine, std::move(world)));
    return body(*trainer);
  });
}

absl::Status CollectGradients(Trainer& trainer, std::mutex& mu, Tensors& gradients) {
  const Context& context = trainer.context();
  for (const auto& p : trainer.parameters().parameters()) {
    if (!p->spec().trainable) continue;
    const int64_t bytes = p->size() * static_cast<int64_t>(sizeof(float));
    MOE_ASSIGN_OR_RETURN(const Buffer scratch, Buffer::Allocate(bytes, *context.memory));
    MOE_ASSIGN_OR_RETURN(
        const auto gradient,
        trainer.reducer().Gradient(*p, 1.0, scratch.span<float>(), *context.compute));
    std::vector<float> copy(gradient.size());
    MOE_RETURN_IF_ERROR(context.compute->CopyBytes(gradient.data(), copy.data(), bytes));
    MOE_RETURN_IF_ERROR(context.compute->Synchronize());
    const std::lock_guard<std::mutex> lock(mu);
    const std::string& name = p->spec().name;
    const auto [at, fresh] = gradients.emplace(name, copy);
    if (!fresh) ExpectSameBits(name + " of a replica", copy, at->second);
  }
  return absl::OkStatus();
}

void ExpectSameBits(const std::string& name, absl::Span<const float> got,
                    absl::Span<const float> expected) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  for (size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(std::memcmp(&got[i], &expected[i], sizeof(float)), 0)
        << name << "[" << i << "]: " << got[i] << ", expected " << expected[i];
  }
}

void ExpectSameBits(const Tensors& got, const Tensors& expected) {
  ASSERT_EQ(got.size(), expected.size());
  for (const auto& [name, values] : expected) {
    ASSERT_TRUE(got.contains(name)) << name;
    ExpectSameBits(name, got.at(name), values);
  }
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
  laid_out.config = LaidOut(work.config, layout);
  RunTrainers(layout,
              {.session = {.numerics = numerics},
               .dtype = DTypeOf<T>::value,
               .seed = work.seed,
               .micro_batches = static_cast<int64_t>(work.micro_batch_tokens.size())},
              [&](Trainer& trainer) { return RankRun<T>(laid_out, trainer, result, mu).Run(); });
  return result;
}

template LayerResult RunLayer<float>(const LayerWork&, const Layout&, Numerics);
template LayerResult RunLayer<BFloat16>(const LayerWork&, const Layout&, Numerics);

void ExpectSameBits(const LayerResult& got, const LayerResult& expected) {
  ExpectSameBits("y", got.y, expected.y);
  ExpectSameBits("dx", got.dx, expected.dx);
  ExpectSameBits(got.gradients, expected.gradients);
  EXPECT_EQ(got.expert_count, expected.expert_count);
  EXPECT_EQ(got.dropped_slots, expected.dropped_slots);
}

}  // namespace moe::testing
