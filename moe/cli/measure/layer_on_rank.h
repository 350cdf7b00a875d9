// What moe bench layer calls over and over: the layer of one rank, with its tokens and their
// routing.
#ifndef MOE_MOE_CLI_MEASURE_LAYER_ON_RANK_H_
#define MOE_MOE_CLI_MEASURE_LAYER_ON_RANK_H_

#include <array>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include <absl/status/status.h>
#include <absl/types/span.h>

#include "gating/router.h"
#include "gating/router_config.h"
#include "moe/cli/measure/layer_bench.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/layer/moe_layer.h"
#include "moe/run/context.h"
#include "moe/train/trainer.h"

namespace moe::measure {

// Two results a call, y and dx; calls of a record must agree.
template <typename T>
class FirstResults {
 public:
  // Keeps results of at most so many bytes; those of the first record whatever their size.
  explicit FirstResults(int64_t most_bytes) : most_bytes_(most_bytes) {}

  // Adds to `wrong` the elements of each result that differ from the record's first ones, bit for
  // bit; none if the record comes for the first time, or was not kept.
  void Compare(int64_t record, absl::Span<const T> y, absl::Span<const T> dx,
               std::array<int64_t, 2>& wrong) {
    const auto kept = first_.find(record);
    if (kept != first_.end()) {
      wrong[0] += Differ(y, kept->second[0]);
      wrong[1] += Differ(dx, kept->second[1]);
      return;
    }
    const auto bytes = static_cast<int64_t>((y.size() + dx.size()) * sizeof(T));
    if (!first_.empty() && kept_bytes_ + bytes > most_bytes_) return;
    kept_bytes_ += bytes;
    first_[record] = {std::vector<T>(y.begin(), y.end()), std::vector<T>(dx.begin(), dx.end())};
  }

 private:
  static int64_t Differ(absl::Span<const T> now, const std::vector<T>& first) {
    int64_t count = 0;
    for (size_t i = 0; i < first.size(); ++i) {
      count += std::memcmp(&now[i], &first[i], sizeof(T)) != 0;
    }
    return count;
  }

  const int64_t most_bytes_;
  int64_t kept_bytes_ = 0;
  std::map<int64_t, std::array<std::vector<T>, 2>> first_;  // by record
};

// Gate that gives the tokens of one rank's next call the slots that it was passed. It does the work
// of mixtral's gate (softmax, top-k, counts), then replaces the experts found by the given ones:
// weights are their probabilities, divided by their sum, and gradients flow accordingly. What
// follows a gate (capacity, drops, losses) is the router's as usual.
//
// Gates of RouterConfig are found by name in the whole process, by all ranks that are threads, so
// an assignment is found through the seed of the configuration. Must live as long as layers use it.
class AssignedGate {
 public:
  // most_slots: of a token, in any call.
  AssignedGate(TokenSlots slots, int32_t most_slots);
  ~AssignedGate();
  AssignedGate(const AssignedGate&) = delete;
  AssignedGate& operator=(const AssignedGate&) = delete;

  // Makes `config` name this gate.
  void Choose(RouterConfig& config) const;
  // Sets the slots of calls from now on. Not while a call runs, nor between its forward and its
  // backward.
  void Assign(TokenSlots slots) { given_->slots = std::move(slots); }
  // Tokens that a batch must have.
  int64_t tokens() const { return given_->slots.tokens(); }

  struct Given {
    TokenSlots slots;
    int32_t most_slots = 1;
  };

 private:
  const std::shared_ptr<Given> given_;  // layers hold it too
  uint64_t id_ = 0;
};

inline constexpr Phase kLayerPhases[] = {Phase::kGate, Phase::kPlan, Phase::kDispatch,
                                         Phase::kExpert, Phase::kCombine};
inline constexpr int kLayerParts = static_cast<int>(std::size(kLayerPhases)) + 1;  // and the whole
inline constexpr const char* kPasses[] = {"forward", "backward"};

// Microseconds of one call on one rank: [pass][part].
using CallTimes = std::array<double, 2 * kLayerParts>;

// The router's counts of this rank's tokens, summed over calls.
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

  // Number of calls with different routing.
  int64_t records() const;
  // Tokens of the last call, those of this rank's tensor group.
  int64_t tokens() const;
  // Bytes of the workspace, parameters with their gradients, tokens and results.
  int64_t bytes() const;

  // One forward and, unless spec.forward_only, one backward, each from a barrier. `wrong` [pass]
  // counts the elements that differ from the first call with this record. With `load`, which costs
  // time, the router's counts are added to it, on one rank of a tensor group. Collective.
  absl::Status Call(int64_t call, CallTimes& times, std::array<int64_t, 2>& wrong,
                    RouterLoad* load);

 private:
  template <typename Work>
  absl::Status TimedPass(const Pass& pass, int which, CallTimes& times, Work work);
  int64_t hidden() const { return spec_.layer.router.hidden_size; }
  MatrixView<T> View(const Buffer& values, int64_t tokens) const {
    return MatrixView<T>(values.template span<T>().data(), tokens, hidden());
  }
  // Normal values on the context's device; `which` distinguishes x and dy.
  absl::StatusOr<Buffer> RandomTokens(int64_t tokens, uint32_t which) const;
  absl::Status CompareResults(int64_t record, std::array<int64_t, 2>& wrong);

  const LayerSpec spec_;
  Trainer& trainer_;
  const Context& context_;
  std::unique_ptr<AssignedGate> gate_;  // with spec_.routing
  int64_t record_ = 0;                  // whose slots the gate has
  std::unique_ptr<MoeLayer<T>> layer_;
  Buffer x_, dy_, y_, dx_;           // on the context's device
  std::vector<T> host_y_, host_dx_;  // results to compare, if the device is no CPU
  int64_t calls_ = 0;
  FirstResults<T> first_;
};

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_LAYER_ON_RANK_H_
