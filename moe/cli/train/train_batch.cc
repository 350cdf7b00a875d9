#include "moe/cli/train/train_batch.h"

#include <optional>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe::cli {
namespace {

std::optional<int64_t> Given(const Settings& settings, const char* name) {
  if (!settings.given(name)) return std::nullopt;
  return settings.integer(name);
}

// batch / part, or the nearest batch that `part` divides.
absl::StatusOr<int64_t> Divide(int64_t batch, int64_t part, const char* part_flag) {
  if (batch % part == 0) return batch / part;
  const int64_t below = batch / part * part;
  const int64_t nearest = below > 0 && batch - below <= part / 2 ? below : below + part;
  return absl::InvalidArgumentError(absl::StrCat("--train-batch-size is ", batch,
                                                 ", expected a multiple of ", part_flag, " ", part,
                                                 ", nearest ", nearest));
}

}  // namespace

absl::StatusOr<BatchSizes> ResolveBatch(const Settings& settings, int ranks) {
  const auto batch = Given(settings, "train-batch-size");
  const auto accumulation = Given(settings, "gradient-accumulation-steps");
  const auto given_size = Given(settings, "micro-batch-size");
  auto count = Given(settings, "micro-batches");
  if (accumulation.has_value()) {
    const int64_t implied = *accumulation * ranks;
    if (count.has_value() && *count != implied) {
      return absl::InvalidArgumentError(absl::StrCat("--micro-batches is ", *count, ", expected ",
                                                     implied, ": --gradient-accumulation-steps ",
                                                     *accumulation, " x ", ranks, " ranks"));
    }
    count = implied;
  }
  BatchSizes sizes = {given_size.value_or(settings.integer("micro-batch-size")),
                      count.value_or(settings.integer("micro-batches"))};
  if (!batch.has_value()) return sizes;
  if (!count.has_value()) {
    MOE_ASSIGN_OR_RETURN(sizes.micro_batches,
                         Divide(*batch, sizes.micro_batch_size, "--micro-batch-size"));
  } else if (!given_size.has_value()) {
    MOE_ASSIGN_OR_RETURN(sizes.micro_batch_size,
                         Divide(*batch, sizes.micro_batches, "the micro-batches,"));
  } else if (sizes.micro_batch_size * sizes.micro_batches != *batch) {
    return absl::InvalidArgumentError(absl::StrCat("--train-batch-size is ", *batch, ", expected ",
                                                   sizes.micro_batch_size * sizes.micro_batches,
                                                   ": --micro-batch-size ", sizes.micro_batch_size,
                                                   " x ", sizes.micro_batches, " micro-batches"));
  }
  return sizes;
}

}  // namespace moe::cli
