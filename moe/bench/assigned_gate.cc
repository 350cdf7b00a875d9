#include "moe/bench/assigned_gate.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <utility>

#include <absl/strings/str_cat.h>

#include "gating/gate.h"
#include "gating/token_choice_gate.h"
#include "kernels/base/status_macros.h"
#include "kernels/topk_gate/topk_gate.h"

namespace moe::bench {
namespace {

using Given = AssignedGate::Given;

constexpr char kName[] = "bench-assigned";

// What is alive, by the seed that stands for it.
class Registry {
 public:
  uint64_t Add(std::shared_ptr<const Given> given) {
    const std::lock_guard<std::mutex> lock(mu_);
    given_[++last_] = std::move(given);
    return last_;
  }
  void Remove(uint64_t id) {
    const std::lock_guard<std::mutex> lock(mu_);
    given_.erase(id);
  }
  std::shared_ptr<const Given> Find(uint64_t id) const {
    const std::lock_guard<std::mutex> lock(mu_);
    const auto at = given_.find(id);
    MOE_CHECK(at != given_.end());
    return at->second;
  }

 private:
  mutable std::mutex mu_;
  uint64_t last_ = 0;                                       // guarded by mu_
  std::map<uint64_t, std::shared_ptr<const Given>> given_;  // guarded by mu_
};

Registry& TheRegistry() {
  static Registry registry;
  return registry;
}

class GivenGate final : public ScaledTokenChoiceGate {
 public:
  GivenGate(std::shared_ptr<const Given> given, int32_t top_k)
      : ScaledTokenChoiceGate({.top_k = given->most_slots}, Weights::kNormalised),
        given_(std::move(given)),
        top_k_(top_k) {}

  bool RunsOn(DeviceKind device) const override { return device == DeviceKind::kCpu; }

  absl::StatusOr<GateSelection> Select(const GateInput& input, Workspace& workspace,
                                       Stream& stream) const override {
    const TokenSlots& given = given_->slots;
    const int64_t tokens = input.logits.rows();
    const int64_t experts = input.logits.cols();
    if (tokens != given.tokens()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "AssignedGate: ", tokens, " tokens, expected the ", given.tokens(), " that have slots"));
    }
    const auto slots = static_cast<int64_t>(given.expert.size());
    MOE_ASSIGN_OR_RETURN(const auto found, workspace.Matrix<int32_t>(tokens, top_k_));
    MOE_ASSIGN_OR_RETURN(const auto value, workspace.Matrix<float>(tokens, top_k_));
    MOE_ASSIGN_OR_RETURN(const auto score, workspace.Matrix<float>(tokens, experts));
    MOE_ASSIGN_OR_RETURN(const auto log_sum_exp, workspace.Array<float>(tokens));
    MOE_ASSIGN_OR_RETURN(const auto count, workspace.Array<int64_t>(experts));
    MOE_ASSIGN_OR_RETURN(const auto weight, workspace.Array<float>(slots));
    MOE_RETURN_IF_ERROR(TopKGate(input.logits,
                                 {.probs = score,
                                  .expert = found,
                                  .value = value,
                                  .log_sum_exp = log_sum_exp,
                                  .count = count},
                                 stream));
    MOE_RETURN_IF_ERROR(stream.Enqueue([&given, score, weight, count] {
      std::fill(count.begin(), count.end(), int64_t{0});
      for (int64_t t = 0; t < given.tokens(); ++t) {
        const int64_t first = given.slot_offset[t];
        const int64_t last = given.slot_offset[t + 1];
        for (int64_t s = first; s < last; ++s) {
          weight[s] = score(t, given.expert[s]);
          ++count[given.expert[s]];
        }
        Normalise(weight.subspan(first, last - first));
      }
      return absl::OkStatus();
    }));
    return GateSelection{.slot_offset = given.slot_offset,
                         .expert = given.expert,
                         .weight = weight,
                         .count = count,
                         .score = score,
                         .log_sum_exp = log_sum_exp};
  }

 private:
  const std::shared_ptr<const Given> given_;
  const int32_t top_k_;
};

// Once in the life of the process.
void Register() {
  static const absl::Status status = RegisterGate(
      {.name = kName, .make = [](const RouterConfig& config) {
         return std::make_unique<GivenGate>(TheRegistry().Find(config.seed), config.top_k);
       }});
  MOE_CHECK(status.ok());
}

}  // namespace

AssignedGate::AssignedGate(TokenSlots slots, int32_t most_slots)
    : given_(std::make_shared<Given>(Given{std::move(slots), most_slots})) {
  Register();
  id_ = TheRegistry().Add(given_);
}

AssignedGate::~AssignedGate() {
  TheRegistry().Remove(id_);
}

void AssignedGate::Choose(RouterConfig& config) const {
  config.gate = kName;
  config.seed = id_;
}

}  // namespace moe::bench
