// Layouts of local ranks, trainers in them, and what they compute put together.
#ifndef MOE_TESTS_MOE_LAYER_HARNESS_H_
#define MOE_TESTS_MOE_LAYER_HARNESS_H_

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

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_LAYER_HARNESS_H_
