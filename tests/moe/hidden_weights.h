// A store whose values exist only under leases.
#ifndef MOE_TESTS_MOE_HIDDEN_WEIGHTS_H_
#define MOE_TESTS_MOE_HIDDEN_WEIGHTS_H_

#include <map>
#include <optional>

#include "moe/state/weight_lease.h"

namespace moe::testing {

// Hides what is not leased: a module that reads values without a lease ends the test. Parameters
// that are added later are hidden from the next lease on.
class HiddenWeights final : public WeightSource {
 public:
  explicit HiddenWeights(const ParameterStore& store) : store_(store) { HideOthers(); }

  absl::Status Acquire(const Pass& /*pass*/, absl::Span<Parameter* const> parameters) override {
    for (const Parameter* p : parameters) ++leases_[p];
    HideOthers();
    return absl::OkStatus();
  }
  void Release(absl::Span<Parameter* const> parameters) override {
    for (const Parameter* p : parameters) --leases_[p];
    HideOthers();
  }

 private:
  void HideOthers() {
    constexpr absl::Span<const std::byte> kNothing;
    for (const auto& p : store_.parameters()) {
      store_.SetValues(*p, leases_[p.get()] > 0 ? std::nullopt : std::optional(kNothing));
    }
  }

  const ParameterStore& store_;
  std::map<const Parameter*, int> leases_;  // leases of each
};

}  // namespace moe::testing

#endif  // MOE_TESTS_MOE_HIDDEN_WEIGHTS_H_
