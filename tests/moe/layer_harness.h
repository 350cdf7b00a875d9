// Runs one MoE layer, forward and backward, in any layout of local ranks.
#ifndef MOE_TESTS_MOE_LAYER_HARNESS_H_
#define MOE_TESTS_MOE_LAYER_HARNESS_H_

#include <cstdint>
#include <functional>
#include <map>
#include <ostream>
#include <string>
#include <vector>

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
  std::vector<float> y, dx;                           // [all tokens, H]
  std::map<std::string, std::vector<float>> weights;  // by name
  std::map<std::string, std::vector<float>> gradients;
  std::vector<int64_t> expert_count;
  int64_t dropped_slots = 0;
  double aux_loss = 0, z_loss = 0;  // sums over micro-batches
};

// Where layers run: on CUDA devices, which ranks take in turn, if MOE_TEST_DEVICE is "cuda", else
// on the CPU.
DeviceKind LayerDevice();

// T: storage type of activations and compute weights.
template <typename T>
LayerResult RunLayer(const LayerWork& work, const Layout& layout, Numerics numerics);

// Every element has the same bits.
void ExpectSameBits(const LayerResult& got, const LayerResult& expected);

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_HARNESS_H_
