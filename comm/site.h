// Where in a run a piece of work belongs: for messages of failed waits and the time line.
#ifndef MOE_COMM_SITE_H_
#define MOE_COMM_SITE_H_

#include <cstdint>

#include <absl/time/time.h>

namespace moe {

// Passed with the work itself. Numbers that do not apply are -1.
struct Site {
  const char* name = "";  // a string literal, such as "dispatch"
  int32_t layer = -1;
  int32_t round = -1;  // within the step, or the number of a benchmark's call
  int64_t step = -1;
  int32_t stage = -1;  // of a pipeline; with it, the micro-batch among those of all ranks
  int64_t micro_batch = -1;
  // How much longer than a communicator's deadline peers may be silent here without being late.
  absl::Duration grace = {};

  // The same place under another name.
  Site Named(const char* other) const {
    Site site = *this;
    site.name = other;
    return site;
  }
};

}  // namespace moe

#endif  // MOE_COMM_SITE_H_
