// What `moe verify` runs, as functions of a seed: a layer, its weights and one global batch; or a
// model that trains on random bytes.
#ifndef MOE_MOE_CLI_VERIFY_PROBLEM_H_
#define MOE_MOE_CLI_VERIFY_PROBLEM_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "kernels/base/dtype.h"
#include "moe/cli/verify/bounded.h"
#include "moe/cli/verify/reference.h"
#include "moe/layer/moe_layer.h"
#include "moe/lm/text_data.h"
#include "moe/lm/training_loop.h"

namespace moe::verify {

// A problem before its data are drawn.
struct ProblemSpec {
  MoeLayerConfig layer;
  DType dtype = DType::kFloat32;            // or kBFloat16, kFloat16
  std::vector<int64_t> micro_batch_tokens;  // [M], zeros allowed
  uint64_t seed = 1;
  // A model with such layers, of steps, sequences and leaves as they are here; the fields above and
  // the layout set the rest (TrainConfigOf).
  std::optional<lm::TrainConfig> model;
};

// Kind of one tensor of the results, by which messages name its elements.
enum class TensorKind : uint8_t {
  kTokens,
  kParameter,
  kPerMicroBatch,
  kPerExpert,
  kPerStep,
  kPerStepExpert,  // and per MoE layer
};

struct TensorSpec {
  std::string name;    // "y", "experts.3.down_proj.weight", "aux_loss"
  std::string family;  // the same without the expert's number
  int64_t expert = -1;
  TensorKind kind = TensorKind::kParameter;
  int64_t rows = 1;
  int64_t cols = 1;
  int64_t rows_of_step = 1;  // kPerStepExpert
  int64_t size() const { return rows * cols; }
};

// Two optimiser steps on one batch: the first only routes and counts, so that the second starts
// from a moved expert bias and from the counts that the global loss compares with. Results are the
// second step's, and the expert bias after it.
struct Problem {
  ProblemSpec spec;
  uint64_t data_seed = 0;  // spec.seed, or the next one whose decisions float32 cannot turn
  std::string redrawn;     // why data_seed is not spec.seed; empty
  std::vector<int64_t> micro_batch_offsets, sequence_offsets;
  std::vector<float> x, dy;                              // [tokens, H], exact in dtype
  std::map<std::string, std::vector<float>> parameters;  // by name; matrices exact in dtype
  std::vector<TensorSpec> tensors;
  std::vector<std::vector<Bounded>> reference;      // by tensor; empty for a model
  std::vector<std::vector<int32_t>> token_experts;  // [tokens] for messages
  std::shared_ptr<const lm::Corpus> corpus;         // of a model

  int64_t tokens() const { return micro_batch_offsets.back(); }
};

// Draws data from spec.seed, spec.seed + 1, ... until every decision of the reference (which
// expert, what is dropped) has a margin above its rounding bound, and runs the reference. The data
// hold ties on purpose: two experts of one router row, and in every micro-batch of three tokens or
// more the last equal to the first.
//   kInvalidArgument: a bad layer
//   kFailedPrecondition: no such data in 200 draws
absl::StatusOr<Problem> MakeProblem(const ProblemSpec& spec);

// A model, its bytes and the tensors of its results: loss, balance loss, gradient norm, loads and
// drops of every step, the held-out losses, and a hash of the final weights. kInvalidArgument.
absl::StatusOr<Problem> MakeModelProblem(const ProblemSpec& spec);

// Lengths of `count` micro-batches, at most `most` tokens each: none alike, one empty, one of a
// single token (two for Sinkhorn, which makes all experts of a lone token equal).
std::vector<int64_t> UnevenMicroBatches(int64_t count, int64_t most, const std::string& gate);

// The same problem from a known data seed, without the reference.
absl::StatusOr<Problem> DrawProblem(const ProblemSpec& spec, uint64_t data_seed);

// The reference's form of a layer, with its gate as mechanisms, as docs/routing.md defines them.
absl::StatusOr<ReferenceConfig> ReferenceConfigOf(const ProblemSpec& spec);

}  // namespace moe::verify

#endif  // MOE_MOE_CLI_VERIFY_PROBLEM_H_
