// What moe bench layer calls over and over: the layer of one rank, with its tokens and their
// routing.
#ifndef MOE_MOE_BENCH_LAYER_ON_RANK_H_
#define MOE_MOE_BENCH_LAYER_ON_RANK_H_

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/status.h>

#include "gating/router.h"
#include "moe/bench/assigned_gate.h"
#include "moe/bench/first_results.h"
#include "moe/bench/layer_bench.h"
#include "moe/context.h"
#include "moe/moe_layer.h"
#include "moe/trainer.h"

namespace moe::bench {

inline constexpr Phase kLayerPhases[] = {Phase::kGate, Phase::kPlan, Phase::kDispatch,
                                         Phase::kExpert, Phase::kCombine};
inline constexpr int kLayerParts = static_cast<int>(std::size(kLayerPhases)) + 1;  // and the whole
inline constexpr const char* kPasses[] = {"forward", "backward"};

// Microseconds of one call on one rank: [pass][part].
using CallTimes = std::array<double, 2 * kLayerParts>;

// What the router did with this rank's tokens, summed over calls.
struct RouterLoad {
  std::vector<int64_t> expert_count;  // [E]
  int64_t dropped = 0;
  int64_t calls = 0;
};

// T is float, BFloat16 or Float16.
template <typename T>
class LayerOnRank {
 public:
  LayerOnRank(const LayerSpec& spec, Trainer& trainer);

  absl::Status Setup();

  // Calls that differ in what is routed where.
  int64_t records() const;
  // Of the last call.
  int64_t tokens() const;
  // Workspace, parameters with their gradients, tokens and results.
  int64_t bytes() const;

  // One forward and one backward, each from a barrier. `wrong` [pass] counts the elements that
  // differ from the first call with this record. With `load`, which costs time, the router's counts
  // are added to it. Collective.
  absl::Status Call(int64_t call, CallTimes& times, std::array<int64_t, 2>& wrong,
                    RouterLoad* load);

 private:
  template <typename Work>
  absl::Status Pass(int pass, CallTimes& times, Work work);
  int64_t hidden() const { return spec_.layer.router.hidden_size; }
  MatrixView<T> View(const Buffer& values, int64_t tokens) const {
    return MatrixView<T>(values.template span<T>().data(), tokens, hidden());
  }
  // Normal values of one kind, on the context's device.
  absl::StatusOr<Buffer> RandomTokens(int64_t tokens, uint32_t which) const;
  absl::Status CompareResults(int64_t record, std::array<int64_t, 2>& wrong);

  const LayerSpec spec_;
  Trainer& trainer_;
  const Context& context_;
  std::unique_ptr<AssignedGate> gate_;  // with spec_.routing
  int64_t record_ = 0;                  // whose slots it has
  std::unique_ptr<MoeLayer<T>> layer_;
  Buffer x_, dy_, y_, dx_;           // on the context's device
  std::vector<T> host_y_, host_dx_;  // results to compare, where that is no CPU
  int64_t calls_ = 0;
  FirstResults<T> first_;
};

}  // namespace moe::bench

#endif  // MOE_MOE_BENCH_LAYER_ON_RANK_H_
