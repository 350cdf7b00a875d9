// What the tests of CUDA kernels on the simulator share: schedules, and matrices in every layout
// that a kernel's choice between vector and scalar accesses depends on.
#ifndef MOE_TESTS_CUSIM_SCHEDULES_H_
#define MOE_TESTS_CUSIM_SCHEDULES_H_

#include <cstdint>
#include <cstring>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "kernels/base/rng.h"
#include "kernels/base/tensor_view.h"
#include "tests/cusim/cusim.h"
#include "tests/sanitizers.h"

namespace cusim {

// Runs `check` under several seeds; kernels' launchers use them. Under sanitizers one is enough: an
// access out of bounds, or one that nothing orders, is found in every schedule.
template <typename Check>
void ForSeeds(Check check) {
  for (uint32_t seed = 1; seed <= (moe::testing::kSanitized ? 1 : 3); ++seed) {
    SCOPED_TRACE(::testing::Message() << "seed " << seed);
    const ScopedLaunchOptions options(
        {.seed = seed, .resident_blocks = static_cast<int>(1 + seed % 2)});
    check();
  }
}

// The first row begins `offset` elements after a multiple of 16 bytes, and rows lie `gap` apart.
struct Layout {
  int64_t offset, gap;
  bool operator==(const Layout&) const = default;
};
// Gaps and offsets that keep rows of whole vectors aligned, and such that do not.
inline constexpr Layout kLayouts[] = {{0, 0}, {0, 8}, {8, 0}, {1, 0}, {0, 3}};

// Layouts of two matrices of one operation: both aligned, one of them, or none.
struct LayoutPair {
  Layout in, out;
};
inline constexpr LayoutPair kLayoutPairs[] = {{kLayouts[0], kLayouts[1]},
                                              {kLayouts[1], kLayouts[2]},
                                              {kLayouts[2], kLayouts[3]},
                                              {kLayouts[3], kLayouts[4]},
                                              {kLayouts[4], kLayouts[0]}};

// A [rows, cols] matrix in "device memory": nothing after its last element, so that
// AddressSanitizer finds accesses beyond it, and sentinels in the gaps, which no kernel may touch.
template <typename T>
class DeviceMatrix {
 public:
  DeviceMatrix(int64_t rows, int64_t cols, Layout layout)
      : layout_(layout),
        rows_(rows),
        cols_(cols),
        stride_(cols + layout.gap),
        data_(rows == 0 || cols == 0
                  ? 0
                  : static_cast<size_t>(layout.offset + (rows - 1) * stride_ + cols),
              T(kSentinel)) {}

  // Standard normal values, a function of the seed and the element.
  static DeviceMatrix Random(int64_t rows, int64_t cols, Layout layout, uint64_t seed,
                             float scale = 1) {
    DeviceMatrix m(rows, cols, layout);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        const auto value = moe::Normal({.seed = seed, .item = static_cast<uint64_t>(r * cols + c)});
        m.view()(r, c) = T(scale * static_cast<float>(value));
      }
    }
    return m;
  }

  moe::MatrixView<T> view() { return {data_.data() + Begin(), rows_, cols_, stride_}; }
  moe::MatrixView<const T> view() const { return {data_.data() + Begin(), rows_, cols_, stride_}; }

  // Every element, those of gaps and offset among them, bit by bit: zeros have signs, NaNs
  // payloads.
  bool operator==(const DeviceMatrix& o) const {
    return layout_ == o.layout_ && rows_ == o.rows_ && cols_ == o.cols_ && stride_ == o.stride_ &&
           data_.size() == o.data_.size() &&
           (data_.empty() ||
            std::memcmp(data_.data(), o.data_.data(), data_.size() * sizeof(T)) == 0);
  }

 private:
  static constexpr float kSentinel = -77.0f;
  int64_t Begin() const { return data_.empty() ? 0 : layout_.offset; }

  Layout layout_;
  int64_t rows_, cols_, stride_;
  std::vector<T> data_;
};

inline std::vector<float> RandomFloats(int64_t n, uint64_t seed) {
  std::vector<float> values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    values[i] = static_cast<float>(moe::Normal({.seed = seed, .item = static_cast<uint64_t>(i)}));
  }
  return values;
}

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_SCHEDULES_H_
