// Converts exceptions to statuses where they would leave a thread, a stream or a destructor.
#ifndef MOE_KERNELS_BASE_CAUGHT_H_
#define MOE_KERNELS_BASE_CAUGHT_H_

#include <absl/status/status.h>

namespace moe {

// The status of the exception that is being handled: that of an absl::BadStatusOrAccess,
// kResourceExhausted where memory or threads have run out, else kInternal. Allocates nothing for
// std::bad_alloc.
absl::Status StatusOfException() noexcept;

// The result of run(), a status or a StatusOr, or the status of its exception.
template <typename Run>
auto Caught(const Run& run) noexcept -> decltype(run()) {
  try {
    return run();
  } catch (...) {
    return StatusOfException();
  }
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_CAUGHT_H_
