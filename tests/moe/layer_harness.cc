#include "tests/moe/layer_harness.h"

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <utility>

#include <gtest/gtest.h>

#include "kernels/base/status_macros.h"
#include "tests/comm/local_ranks.h"
#include "tests/moe/hidden_weights.h"

namespace moe::testing {
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

void RunSessions(int ranks, const SessionOptions& options,
                 absl::FunctionRef<absl::Status(Session&)> body) {
  RunLocalRanks(ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto session, Session::Create(options, std::move(world)));
    return body(*session);
  });
}

void RunTrainers(const Layout& layout, const TrainerOptions& options,
                 absl::FunctionRef<absl::Status(Trainer&)> body) {
  RunLocalRanks(layout.ranks, [&](std::unique_ptr<Communicator> world) -> absl::Status {
    TrainerOptions mine = options;
    mine.session.device = LayerDevice();
    mine.session.mesh = {.tensor = layout.tensor,
                         .expert_tensor = layout.expert_tensor,
                         .expert = layout.expert_parallel};
    mine.session.threads = layout.threads;
    mine.session.overlap_exchange = layout.overlap > 1;
    mine.all_reduce = layout.all_reduce;
    MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(mine, std::move(world)));
    if (options.zero == ZeroStage::kWeights) return body(*trainer);  // it hides them itself
    HiddenWeights weights(trainer->parameters());
    trainer->set_weights(&weights);
    return body(*trainer);
  });
}

absl::StatusOr<std::vector<float>> GradientOf(const Parameter& parameter, GradientReducer& reducer,
                                              const Context& context) {
  std::vector<float> gradient(static_cast<size_t>(parameter.size()));
  const auto bytes = static_cast<int64_t>(gradient.size() * sizeof(float));
  MOE_ASSIGN_OR_RETURN(const Buffer scratch, Buffer::Allocate(bytes, *context.memory));
  MOE_ASSIGN_OR_RETURN(const auto sum,
                       reducer.Gradient(parameter, 1.0, scratch.span<float>(), *context.compute));
  MOE_RETURN_IF_ERROR(context.compute->CopyBytes(sum.data(), gradient.data(), bytes));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  return gradient;
}

absl::Status CollectGradients(Trainer& trainer, std::mutex& mu, Tensors& gradients) {
  for (const auto& p : trainer.parameters().parameters()) {
    if (!p->spec().trainable) continue;
    MOE_ASSIGN_OR_RETURN(const auto gradient, GradientOf(*p, trainer.reducer(), trainer.context()));
    const std::lock_guard<std::mutex> lock(mu);
    const std::string& name = p->spec().name;
    const auto [at, fresh] = gradients.emplace(name, gradient);
    if (!fresh) ExpectSameBits(name + " of a replica", gradient, at->second);
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

MoeLayerConfig LayerConfig(int overlap) {
  return {.router = {.gate = "deepseek-v3", .num_experts = 6, .top_k = 2, .hidden_size = kHidden},
          .ffn_hidden_size = 12,
          .overlap_degree = overlap};
}

std::vector<float> RowValues(int64_t rows, int64_t seed) {
  std::vector<float> values(static_cast<size_t>(rows * kHidden));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = std::sin(static_cast<float>(i * i + 31 * static_cast<size_t>(seed)));
  }
  return values;
}

std::vector<float> Rows(const Round& round) {
  return RowValues(round.empty() ? 0 : kTokens, round.micro_batch());
}

absl::Status LayerRank::Create(const MoeLayerConfig& config, DeviceKind kind,
                               SessionOptions options, std::unique_ptr<Communicator> world,
                               absl::Span<const int64_t> rows) {
  options.mesh.expert = world->size();
  options.device = kind;
  MOE_ASSIGN_OR_RETURN(session, Session::Create(options, std::move(world)));
  store = std::make_unique<ParameterStore>(DType::kFloat32, 1, context());
  MOE_ASSIGN_OR_RETURN(layer, MoeLayer<float>::Create(config, "", *store, context()));
  MOE_ASSIGN_OR_RETURN(reducer, GradientReducer::Create({.max_terms = 64}, *store, context(),
                                                        session->gradient_stream()));
  for (const int64_t n : rows) {
    for (auto* of_calls : {&x, &y, &dx}) {
      MOE_ASSIGN_OR_RETURN(of_calls->emplace_back(), DeviceRows::Create(n, context()));
    }
  }
  return reducer->Begin();
}

absl::Status LayerRank::Backward(int call, Stash* stash, float d_router_loss) {
  return layer->Backward({.context = context(), .stash = stash, .d_loss = d_router_loss},
                         y[call].view(), dx[call].view(),
                         [](Parameter&) { return absl::OkStatus(); });
}

absl::Status LayerRank::Read(int call, std::vector<std::vector<float>>& into) {
  for (DeviceRows* const rows : {&y[call], &dx[call]}) {
    const auto size = static_cast<size_t>(rows->view().rows() * kHidden);
    MOE_RETURN_IF_ERROR(rows->Read(into.emplace_back(size), context()));
  }
  return absl::OkStatus();
}

absl::Status LayerRank::ReadGradients(std::vector<std::vector<float>>& into) {
  const auto parameters = store->parameters();
  for (auto p = parameters.rbegin(); p != parameters.rend(); ++p) {
    if ((*p)->spec().trainable) MOE_RETURN_IF_ERROR(reducer->MarkReady(**p));
  }
  MOE_RETURN_IF_ERROR(reducer->Finish());
  for (const auto& p : parameters) {
    if (!p->spec().trainable) continue;
    MOE_ASSIGN_OR_RETURN(into.emplace_back(), GradientOf(*p, *reducer, context()));
  }
  return absl::OkStatus();
}

TrainerOptions Options(const Layout& layout, DeviceKind device) {
  return {.session = {.device = device,
                      .mesh = {.tensor = layout.tensor,
                               .expert_tensor = layout.expert_tensor,
                               .expert = layout.expert_parallel},
                      .overlap_exchange = layout.overlap > 1},
          .micro_batches = kMicroBatches,
          .zero = layout.zero};
}

absl::Status RunRound(Trainer& trainer, TrainedLayer<float>& layer) {
  MOE_ASSIGN_OR_RETURN(const Round round, trainer.BeginRound());
  const Context& context = trainer.context();
  const std::vector<float> rows = Rows(round);
  std::vector<float> sum(rows.size());
  const int64_t count = round.empty() ? 0 : kTokens;
  MOE_ASSIGN_OR_RETURN(DeviceRows x, DeviceRows::Create(count, context));
  MOE_ASSIGN_OR_RETURN(DeviceRows y, DeviceRows::Create(count, context));
  MOE_ASSIGN_OR_RETURN(DeviceRows dx, DeviceRows::Create(count, context));
  MOE_RETURN_IF_ERROR(x.Write(rows, context));
  MOE_RETURN_IF_ERROR(layer.Forward(round, x.view(), y.view()));
  MOE_RETURN_IF_ERROR(y.Read(sum, context));
  for (size_t i = 0; i < sum.size(); ++i) sum[i] += rows[i];
  MOE_RETURN_IF_ERROR(y.Write(sum, context));
  MOE_RETURN_IF_ERROR(layer.Backward(round, y.view(), dx.view()));
  return context.compute->Synchronize();  // the rows go
}

absl::Status RunStep(Trainer& trainer, TrainedLayer<float>& layer) {
  for (int64_t r = 0; r < trainer.rounds(); ++r) {
    MOE_RETURN_IF_ERROR(RunRound(trainer, layer));
  }
  return trainer.Step({.learning_rate = 0.01}).status();
}

absl::Status RunSteps(const Layout& layout, std::unique_ptr<Communicator> world,
                      const std::function<void(const Trainer&)>& look, DeviceKind kind) {
  MOE_ASSIGN_OR_RETURN(const auto trainer,
                       Trainer::Create(Options(layout, kind), std::move(world)));
  std::optional<HiddenWeights> weights;  // ZeRO-3 hides them itself
  if (layout.zero != ZeroStage::kWeights) {
    trainer->set_weights(&weights.emplace(trainer->parameters()));
  }
  MOE_ASSIGN_OR_RETURN(auto* const layer,
                       trainer->AddMoeLayer<float>("mlp.", LayerConfig(layout.overlap)));
  for (int step = 1; step <= 3; ++step) MOE_RETURN_IF_ERROR(RunStep(*trainer, *layer));
  look(*trainer);
  return absl::OkStatus();
}

}  // namespace moe::testing
