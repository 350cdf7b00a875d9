// Generates text with a model, one token after another.
#ifndef MOE_MOE_LM_GENERATION_H_
#define MOE_MOE_LM_GENERATION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/evaluation.h"
#include "moe/lm/training_loop.h"

namespace moe::lm {

// Rule that chooses a token from logits l. temperature 0: the largest l, of several the lowest id.
// Otherwise with probability proportional to e^(l / temperature), among the top_k largest (0: all)
// and, of these, the fewest whose probabilities, largest first, add up to top_p of their total.
struct Sampling {
  double temperature = 0;
  int64_t top_k = 0;
  double top_p = 1;
  uint64_t seed = 0;
};

// The id chosen at a place of a sequence: a function of logits [V], options and place alone, Philox
// keyed by (seed, place). kDataLoss for logits that are not finite.
absl::StatusOr<int32_t> SampleToken(absl::Span<const float> logits, const Sampling& sampling,
                                    int64_t place);

struct GenerationOptions {
  std::vector<int32_t> prompt;      // at least one token
  int64_t max_new_tokens = 0;       // at least one
  std::vector<int32_t> end_tokens;  // generation ends with the first of them
  Sampling sampling;
  // Called on rank 0 with each new token; may be empty.
  std::function<absl::Status(int32_t token)> on_token;
};

struct GenerationReport {
  std::vector<int32_t> tokens;  // tokens on rank 0; empty on others
  // Until the first token: processing of the prompt and packing of the weights.
  double prompt_seconds = 0;
  double seconds = 0;                                // for the other tokens
  std::optional<BFloat16Order> bfloat16_order = {};  // Trainer::bfloat16_order
  std::optional<PagingReport> paging = {};
};

// Continues a prompt with `weights` of a model described by `config` (StoredConfig, HfModel). All
// ranks share one set of experts. Rank 0 holds the sequence and a cache of its keys and values, as
// with tensor parallelism (session.mesh.tensor) the ranks of its group do, of their own heads. The
// other ranks hold experts alone: the same tokens at any number of ranks. Router capacity is
// ignored: tokens come one by one. Collective over `world`; CPU. kInvalidArgument: options out of
// range, a router whose experts choose among tokens, ranks that were called with different
// arguments; other errors as Evaluate.
absl::StatusOr<GenerationReport> Generate(const TrainConfig& config, const ModelWeights& weights,
                                          const GenerationOptions& options,
                                          std::unique_ptr<Communicator> world);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_GENERATION_H_
