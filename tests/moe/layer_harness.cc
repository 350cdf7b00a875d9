#include "tests/moe/layer_harness.h"

#include <cstdlib>
#include <cstring>

#include <gtest/gtest.h>

#include "tests/comm/local_ranks.h"

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

}  // namespace moe::testing
