// Layouts of local ranks, and one MoE layer run in them, forward and backward.
#ifndef MOE_TESTS_MOE_LAYER_HARNESS_H_
#define MOE_TESTS_MOE_LAYER_HARNESS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <ostream>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>

#include "moe/trainer.h"

namespace moe::testing {

// How the same work is laid out.
struct Layout {
  int ranks = 1;
  int expert_parallel = 1;
  DispatchAlgorithm dispatch = DispatchAlgorithm::kStaged;
  int node_size = 1;
  int overlap = 1;
  int threads = 1;
  AllReduceAlgorithm all_reduce = AllReduceAlgorithm::kRing;
};
std::ostream& operator<<(std::ostream& out, const Layout& layout);

// `config` with what of `layout` is a layer's own.
MoeLayerConfig LaidOut(MoeLayerConfig config, const Layout& layout);

// Where layers run: on CUDA devices, which ranks take in turn, if MOE_TEST_DEVICE is "cuda", else
// on the CPU.
DeviceKind LayerDevice();

// Calls body(trainer) on every rank of `layout`, which `options` takes the layout's settings from.
void RunTrainers(const Layout& layout, const TrainerOptions& options,
                 absl::FunctionRef<absl::Status(Trainer&)> body);

// By name, put together from all ranks.
using Tensors = std::map<std::string, std::vector<float>>;

// Adds the reduced gradients of this rank to `gradients`, guarded by `mu`; replicas must agree.
absl::Status CollectGradients(Trainer& trainer, std::mutex& mu, Tensors& gradients);

// Every element has the same bits.
void ExpectSameBits(const std::string& name, absl::Span<const float> got,
                    absl::Span<const float> expected);
void ExpectSameBits(const Tensors& got, const Tensors& expected);

// The work: micro-batches of one global batch, and the gradient that comes back from above.
struct LayerWork {
  MoeLayerConfig config;
  std::vector<int64_t> micro_batch_tokens;  // tokens of each micro-batch, zeros allowed
  std::vector<float> x, dy;                 // [all tokens, H]
  // Changes the initial values of parameters, on whatever rank holds them.
  std::function<void(const ParameterSpec&, absl::Span<float>)> override_parameter =
      [](const ParameterSpec&, absl::Span<float>) {
      };
  uint64_t seed = 5;
  // Global counts that the layer has learnt from before this step; empty = this is the first step.
  std::vector<int64_t> last_step_count;

  int64_t tokens() const;
};

// Normal values from a counter-based generator.
LayerWork MakeWork(const MoeLayerConfig& config, std::vector<int64_t> micro_batch_tokens);

// Everything the layer computes, put together from all ranks.
struct LayerResult {
  std::vector<float> y, dx;  // [all tokens, H]
  Tensors weights, gradients;
  std::vector<int64_t> expert_count;
  int64_t dropped_slots = 0;
  double aux_loss = 0, z_loss = 0;  // sums over micro-batches
};

// T: storage type of activations and compute weights.
template <typename T>
LayerResult RunLayer(const LayerWork& work, const Layout& layout, Numerics numerics);

void ExpectSameBits(const LayerResult& got, const LayerResult& expected);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_HARNESS_H_
