// Text that a model writes: one token after another.
#ifndef MOE_MOE_LM_GENERATION_H_
#define MOE_MOE_LM_GENERATION_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/evaluation.h"
#include "moe/lm/trainer.h"

namespace moe::lm {

// How a token is chosen from logits l. temperature 0: the largest l, the lowest id where several
// are. Else with probability proportional to e^(l / temperature), among the top_k largest (0: all)
// and, of these, the fewest whose probabilities, the largest first, add up to top_p of theirs.
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
  std::vector<int32_t> end_tokens;  // one of them is the last token
  Sampling sampling;
  std::function<absl::Status(int32_t token)> on_token;  // on rank 0, as each is there; may be empty
};

struct GenerationReport {
  std::vector<int32_t> tokens;  // of rank 0; empty on others
  double prompt_seconds = 0;    // until the first token: the prompt, and packing the weights
  double seconds = 0;           // for the others
};

// Goes on from a prompt under `weights` of a model that `config` says (StoredConfig, HfModel). All
// ranks share one set of experts; rank 0 has the sequence and a cache of its keys and values, the
// others have experts alone: the same tokens at any number of ranks. Router capacity is left out:
// tokens come one by one. Collective over `world`; CPU. kInvalidArgument: options out of range, a
// router whose experts choose among tokens, ranks that were asked for different things; other
// errors as Evaluate.
absl::StatusOr<GenerationReport> Generate(const TrainConfig& config, const ModelWeights& weights,
                                          const GenerationOptions& options,
                                          std::unique_ptr<Communicator> world);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_GENERATION_H_
