// Tests that measure time.
#ifndef MOE_TESTS_TIMING_H_
#define MOE_TESTS_TIMING_H_

#include <gtest/gtest.h>

// Sanitizers slow computing ten times and sleeping not at all: what overlaps what is then another
// question. First line of every test that compares durations.
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define MOE_SKIP_TIMING_UNDER_SANITIZERS() GTEST_SKIP() << "compares durations"
#else
#define MOE_SKIP_TIMING_UNDER_SANITIZERS() static_cast<void>(0)
#endif

#endif  // MOE_TESTS_TIMING_H_
