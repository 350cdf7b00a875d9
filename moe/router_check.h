// Refuses what a gate would pass over in silence: an expert that is never chosen, or always.
#ifndef MOE_MOE_ROUTER_CHECK_H_
#define MOE_MOE_ROUTER_CHECK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe {

// kDataLoss, naming layer, token and expert, unless all logits are finite. logits [T, columns], of
// tokens from `first_token` on; column c is an output c % outputs.
inline absl::Status CheckLogits(absl::Span<const float> logits, int64_t columns, int64_t outputs,
                                int64_t first_token, int64_t layer) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](float v) { return !std::isfinite(v); });
  if (bad == logits.end()) return absl::OkStatus();
  const int64_t at = bad - logits.begin();
  return absl::DataLossError(
      absl::StrCat("layer ", layer, ": the router's logit of token ", first_token + at / columns,
                   " for expert ", at % columns % outputs, " is ", *bad,
                   ", expected a finite number: look at x and the router's weight and bias"));
}

// The same of an expert bias [E], the parameter `name`.
inline absl::Status CheckExpertBias(absl::Span<const float> bias, absl::string_view name,
                                    int64_t layer) {
  for (size_t e = 0; e < bias.size(); ++e) {
    if (std::isfinite(bias[e])) continue;
    return absl::DataLossError(absl::StrCat("layer ", layer, ": ", name, " of expert ", e, " is ",
                                            bias[e], ", expected a finite number"));
  }
  return absl::OkStatus();
}

}  // namespace moe

#endif  // MOE_MOE_ROUTER_CHECK_H_
