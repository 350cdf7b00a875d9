// What an operation leaves in memory, compared between devices.
#ifndef MOE_TESTS_KERNELS_DEVICE_RESULTS_H_
#define MOE_TESTS_KERNELS_DEVICE_RESULTS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <utility>

#include <gtest/gtest.h>

#include "tests/kernels/device_memory.h"
#include "tests/kernels/op_test.h"

namespace moe::testing {

// Calls operation(device), which returns what it read back as a tuple of vectors, on every device
// and expects what the first, the CPU with its best SIMD target and one thread, gives.
template <typename Operation>
void ExpectSameBitsOnEveryDevice(Operation operation) {
  std::optional<decltype(operation(std::declval<const TestDevice&>()))> expected;
  ForEachDevice([&](const TestDevice& device) {
    const auto got = operation(device);
    if (!expected) expected = got;
    const auto expect = [](size_t index, const auto& values, const auto& wanted) {
      EXPECT_TRUE(SameBits(values, wanted)) << "result " << index;
    };
    const auto expect_all = [&]<size_t... kIndex>(std::index_sequence<kIndex...>) {
      (expect(kIndex, std::get<kIndex>(got), std::get<kIndex>(*expected)), ...);
    };
    expect_all(std::make_index_sequence<std::tuple_size_v<decltype(got)>>());
  });
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_DEVICE_RESULTS_H_
