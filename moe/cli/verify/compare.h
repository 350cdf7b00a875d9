// Runs a problem's layer, or its model, in one layout, and measures one result against another, or
// against the reference.
#ifndef MOE_MOE_CLI_VERIFY_COMPARE_H_
#define MOE_MOE_CLI_VERIFY_COMPARE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "comm/communicator.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/cli/verify/axes.h"
#include "moe/cli/verify/faults.h"
#include "moe/cli/verify/problem.h"
#include "moe/run/context.h"

namespace moe::verify {

// Everything that a run computes, by Problem::tensors.
struct RunResult {
  std::vector<std::vector<float>> tensors;
  // Elements of which two ranks hold different bits, although they must be copies.
  int64_t torn_replicas = 0;
  std::optional<BFloat16Order> bfloat16_order = {};  // Trainer::bfloat16_order
};

struct ProblemRunOptions {
  Layout layout;
  Numerics numerics = Numerics::kLayoutInvariant;
  Fault fault = Fault::kNone;
  DeviceKind device = DeviceKind::kCpu;
  std::optional<BFloat16Order> bfloat16_order;
  // Rows of padding among those of each call of a layer, with NaN in x and dy.
  bool padding = false;
};

// Forward and backward of every micro-batch, with gradients summed by GradientReducer, as in a
// trainer. Rank r of R takes micro-batches [M r / R, M (r + 1) / R), one a round; every rank runs
// ceil(M / R) rounds. On CUDA rank r computes on device r modulo the number of devices. Collective
// over `world`; rank 0's result is complete, the others' are empty.
absl::StatusOr<RunResult> RunLayer(const Problem& problem, const ProblemRunOptions& options,
                                   std::unique_ptr<Communicator> world);

// lm::Train of the problem's model for all its steps. Collective over `world`; rank 0's result is
// complete, the others' are empty.
absl::StatusOr<RunResult> RunModel(const Problem& problem, const ProblemRunOptions& options,
                                   std::unique_ptr<Communicator> world);
// The training that RunModel runs.
lm::TrainConfig TrainConfigOf(const ProblemSpec& spec, const ProblemRunOptions& options);

// Floats between a and b: 0 for equal values (also -0 and 0), 1 for neighbours; INT64_MAX if one of
// them is NaN and the other is not.
int64_t UlpDistance(float a, float b);

// What an element is compared with.
enum class Measure : uint8_t {
  kBits,        // same bits: 0 ulp
  kTwiceBound,  // both are within the reference's bound of the truth, so within twice of each other
  kBound,       // within the reference's bound of the reference's value
};
const char* NameOf(Measure measure);  // "0 ulp", "2 x bound", "bound"

// Position of an element, as messages name it.
struct Place {
  int64_t step = -1;  // from 1
  int64_t layer = -1;
  int64_t token = -1;
  int64_t micro_batch = -1;
  int64_t expert = -1;
  int64_t row = -1;
  int64_t column = -1;
};
std::string Describe(const Place& place);  // "token 3 column 7 expert 2"

// One family of tensors: all experts' down projections together.
struct TensorReport {
  std::string tensor;
  Measure measure = Measure::kBits;
  int64_t elements = 0;
  int64_t differing = 0;  // not the same value
  int64_t wrong = 0;      // against `measure`
  int64_t max_ulp = 0;
  double max_relative_error = 0;  // |got - expected| / |expected|; 0 / 0 = 0
  double max_of_bound = 0;        // largest |got - expected| / allowed; 0 for kBits
  // The first wrong element, else the first that differs.
  Place first;
  float got = 0;
  double expected = 0;
  double allowed = 0;

  bool ok() const { return wrong == 0; }
};

// Compares `got` with the reference, which a layer has.
std::vector<TensorReport> CompareWithReference(const Problem& problem, const RunResult& got);

// Compares `got` with a product's result: bits, or twice the reference's bound.
std::vector<TensorReport> CompareResults(const Problem& problem, const RunResult& got,
                                         const RunResult& expected, Measure measure);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_COMPARE_H_
