// Differences between two checkpoints.
#ifndef MOE_MOE_CLI_CKPT_DIFF_H_
#define MOE_MOE_CLI_CKPT_DIFF_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/status/statusor.h>

#include "moe/checkpoint/reader.h"

namespace moe::ckpt {

// One state of one tensor.
struct StateDifference {
  std::string tensor, state;
  int64_t elements = 0;
  int64_t different = 0;  // elements whose bits differ
  // The largest distance of two elements: the number of representable numbers between them, plus
  // one. 0 between +0 and -0; NaNs count by their bits.
  uint64_t max_ulps = 0;
  double max_abs = 0;  // the largest |a - b|; NaNs are ignored
  std::string only;    // "A", "B": the other lacks this state, or has one of another shape or type
};

// Every state of either checkpoint, in order of names. Errors of CheckpointReader::ReadBox. Memory:
// some million elements of each.
absl::StatusOr<std::vector<StateDifference>> Diff(CheckpointReader& a, CheckpointReader& b);

}  // namespace moe::ckpt

#endif  // MOE_MOE_CLI_CKPT_DIFF_H_
