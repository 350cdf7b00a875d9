// Counts what operator new hands out, and lets it fail, in a program that links counting_new.cc.
#ifndef MOE_TESTS_COUNTING_NEW_H_
#define MOE_TESTS_COUNTING_NEW_H_

#include <cstdint>
#include <functional>

namespace moe {

// Calls of operator new so far, in all threads.
int64_t Allocations();

// From now on the calls `first` (from 1) to `first` + `count` - 1, in all threads, have no memory.
void FailAllocations(int64_t first, int64_t count);

// The most bytes, but for aligned ones, that were live at once while `work` ran, beyond
// those that were before. For one thread.
int64_t PeakBytesOf(const std::function<void()>& work);

}  // namespace moe

#endif  // MOE_TESTS_COUNTING_NEW_H_
