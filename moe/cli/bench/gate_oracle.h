// What a gate is given in a benchmark, and what it should say of it.
#ifndef MOE_MOE_CLI_BENCH_GATE_ORACLE_H_
#define MOE_MOE_CLI_BENCH_GATE_ORACLE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "gating/router_config.h"
#include "moe/cli/bench/kernel_bench.h"

namespace moe::bench {

// [T, columns] logits of a call, the first num_experts of a row those of the routing, the others 0.
struct GateLogits {
  int64_t tokens = 0;
  std::vector<float> values;
};
absl::StatusOr<GateLogits> DrawGateLogits(const KernelSpec& spec, int64_t record, int64_t columns);

// Gates that choose the k largest logits and weigh them by a softmax over all experts (kPlain), or
// over the chosen ones (kOverChosen). nullopt: gates with a rule of their own.
enum class Weighing : uint8_t { kPlain, kOverChosen };
std::optional<Weighing> WeighingOf(const RouterConfig& router);

// What the gate should say of one token, in float64.
struct ExpectedToken {
  std::vector<int32_t> expert;      // [K]
  std::vector<double> probability;  // [E]
  std::vector<double> weight;       // [K]
  // Of a float32 softmax, relative: exp sees a rounded argument (|l - m| ulps of 1) and is right to
  // a few ulps; the sum has E / 16 + 4 roundings. Weights over the chosen divide two such numbers.
  double tolerance = 0;
};
ExpectedToken ExpectToken(absl::Span<const float> logits, int k, Weighing weighing);

// What of a weight is lost below the normal float32 numbers.
inline constexpr double kUnderflow = 0x1p-126;

// Whether `is` is further than `tolerance` from `want`, or no number.
bool IsOff(float is, double want, double tolerance);

// The slots of all tokens, K each, and their counts. Computed once, compared with every call.
class ExpectedSelection {
 public:
  // logits: [T, E].
  ExpectedSelection(absl::Span<const float> logits, int64_t experts, int k, Weighing weighing);

  // expert [T K], weight [T K], count [E]: elements that are wrong.
  int64_t CountWrong(absl::Span<const int32_t> expert, absl::Span<const float> weight,
                     absl::Span<const int64_t> count) const;

  const std::vector<int32_t>& expert() const { return expert_; }  // [T K]
  const std::vector<int64_t>& count() const { return count_; }    // [E]

 private:
  std::vector<int32_t> expert_;
  std::vector<double> weight_, tolerance_;
  std::vector<int64_t> count_;
};

}  // namespace moe::bench

#endif  // MOE_MOE_CLI_BENCH_GATE_ORACLE_H_
