// Where an exception would leave a thread, a stream or a destructor, it becomes a status.
#ifndef MOE_KERNELS_BASE_CAUGHT_H_
#define MOE_KERNELS_BASE_CAUGHT_H_

#include <absl/status/status.h>

namespace moe {

// What the exception that is being handled means: the status of an absl::BadStatusOrAccess,
// kResourceExhausted where memory or threads have run out, else kInternal. Takes no memory for
// std::bad_alloc.
absl::Status StatusOfException() noexcept;

// What run() returns, a status or a StatusOr, or the status of its exception.
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
