// How --train-batch-size, --micro-batch-size, --micro-batches and --gradient-accumulation-steps
// agree.
#ifndef MOE_MOE_CLI_TRAIN_TRAIN_BATCH_H_
#define MOE_MOE_CLI_TRAIN_TRAIN_BATCH_H_

#include <cstdint>

#include <absl/status/statusor.h>

#include "moe/cli/base/settings.h"

namespace moe::cli {

struct BatchSizes {
  int64_t micro_batch_size = 0;
  int64_t micro_batches = 0;  // M, over all ranks
};

// batch = micro-batch-size x M, and M = accumulation x ranks. What is not given follows from what
// is, else from the defaults. All are at least 1. kInvalidArgument when they contradict each other,
// or do not divide.
absl::StatusOr<BatchSizes> ResolveBatch(const Settings& settings, int ranks);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TRAIN_TRAIN_BATCH_H_
