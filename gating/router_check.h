// Refuses what a gate would pass over in silence: an expert that is never chosen, or always.
#ifndef MOE_GATING_ROUTER_CHECK_H_
#define MOE_GATING_ROUTER_CHECK_H_

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe {

// Which logits [T, columns] they are: of tokens from `first_token` on; column c is an output
// c % outputs.
struct LogitPlace {
  int64_t columns = 1, outputs = 1;
  int64_t first_token = 0;
  int64_t layer = 0;
};

// kDataLoss, naming layer, token and expert: logit `at`, t * columns + c, is not finite.
inline absl::Status LogitNotFinite(int64_t at, const LogitPlace& place) {
  return absl::DataLossError(absl::StrCat(
      "layer ", place.layer, ": the router's logit of token ",
      place.first_token + at / place.columns, " for expert ", at % place.columns % place.outputs,
      " is not finite: look at x and the router's weight and bias"));
}

// That of the first of `logits` that is not finite.
inline absl::Status CheckLogits(absl::Span<const float> logits, const LogitPlace& place) {
  const auto bad =
      std::find_if(logits.begin(), logits.end(), [](float v) { return !std::isfinite(v); });
  return bad == logits.end() ? absl::OkStatus() : LogitNotFinite(bad - logits.begin(), place);
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

#endif  // MOE_GATING_ROUTER_CHECK_H_
