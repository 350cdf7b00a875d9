#include "moe/train/loss_scaler.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int kSmallestLog2 = -24, kLargestLog2 = 32;

absl::Status CheckScale(const char* flag, double scale) {
  int exponent = 0;
  const bool is_power = std::isfinite(scale) && std::frexp(scale, &exponent) == 0.5;
  if (is_power && exponent - 1 >= kSmallestLog2 && exponent - 1 <= kLargestLog2) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is %.17g, expected a power of two from 2^%d to 2^%d", flag, scale,
                      kSmallestLog2, kLargestLog2));
}

absl::Status CheckAtLeastOne(const char* flag, int64_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(flag, " is ", value, ", expected at least 1"));
}

}  // namespace

absl::Status ValidateLossScale(const LossScaleOptions& options) {
  if (options.constant != 0) return CheckScale("--loss-scale", options.constant);
  MOE_RETURN_IF_ERROR(CheckScale("--initial-loss-scale", options.initial));
  MOE_RETURN_IF_ERROR(CheckScale("--min-loss-scale", options.minimum));
  if (options.minimum > options.initial) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--min-loss-scale is %.17g, expected at most --initial-loss-scale, %.17g",
                        options.minimum, options.initial));
  }
  MOE_RETURN_IF_ERROR(CheckAtLeastOne("--loss-scale-window", options.window));
  return CheckAtLeastOne("--hysteresis", options.hysteresis);
}

LossScaler::LossScaler(const LossScaleOptions& options)
    : options_(options),
      scale_(options.constant != 0 ? options.constant : options.initial),
      overflows_left_(options.hysteresis) {}

int LossScaler::scale_log2() const {
  return std::ilogb(scale_);
}

void LossScaler::Restore(const State& state) {
  if (options_.constant == 0) scale_ = std::ldexp(1.0, state.scale_log2);
  taken_in_a_row_ = state.taken_in_a_row;
  overflows_left_ = state.overflows_left;
  skipped_ = state.skipped;
}

void LossScaler::StepTaken() {
  if (options_.constant != 0 || ++taken_in_a_row_ < options_.window) return;
  taken_in_a_row_ = 0;
  overflows_left_ = options_.hysteresis;
  scale_ = std::min(scale_ * 2, std::ldexp(1.0, kLargestLog2));
}

absl::Status LossScaler::StepSkipped() {
  ++skipped_;
  if (options_.constant != 0) return absl::OkStatus();
  taken_in_a_row_ = 0;
  if (--overflows_left_ > 0) return absl::OkStatus();
  overflows_left_ = 1;  // from now on every overflow halves, until the scale has doubled
  if (scale_ <= options_.minimum) {
    return absl::DataLossError(absl::StrFormat("the loss scale is at its minimum, %.17g", scale_));
  }
  scale_ /= 2;
  return absl::OkStatus();
}

}  // namespace moe
