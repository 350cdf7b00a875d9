// Which checkpoints in the folder of a run stay: what goes is provably the run's.
#ifndef MOE_MOE_CHECKPOINT_RETENTION_H_
#define MOE_MOE_CHECKPOINT_RETENTION_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/types/span.h>

#include "moe/io/file_system.h"

namespace moe {

struct RetentionOptions {
  int keep = 3;                             // newest readable checkpoints that stay, >= 1
  int64_t keep_every = 0;                   // steps that are a multiple of it stay, too; 0: none
  std::string run;                          // whose they are (RunOf, manifest.h)
  absl::Span<const int64_t> damaged_steps;  // whose data are known to be damaged
};

struct RetentionPlan {
  std::vector<int64_t> removed;  // steps, ascending
  // What else is old enough to go, and what does not count among the newest: each names its path
  // and why.
  std::vector<std::string> left_alone, not_counted;
};

// The plan for `steps` (ascending) of the folder. Checkpoints that count are the run's, in whose
// manifest, sizes and headers CheckpointReader::Open finds nothing wrong; their data are not read.
// What is older than the `keep` newest of them goes, readable or not, if it is the run's: a folder,
// no link, with nothing in it but files of a checkpoint, and a manifest that names this step and
// this run. Damaged checkpoints newer than these stay. What is gone meanwhile is in no list, and
// known damage in none but the first.
// Cost: Open of `keep` checkpoints, and a manifest of each one that goes.
RetentionPlan PlanRetention(const std::string& folder, absl::Span<const int64_t> steps,
                            const RetentionOptions& options, FileSystem& files = RealFileSystem());

}  // namespace moe

#endif  // MOE_MOE_CHECKPOINT_RETENTION_H_
