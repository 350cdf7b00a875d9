// Shared by the tests of single operations: matrices with guarded edges, comparisons, statuses.
#ifndef MOE_TESTS_KERNELS_OP_TEST_H_
#define MOE_TESTS_KERNELS_OP_TEST_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/rng.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "tests/sanitizers.h"

namespace moe::testing {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Under sanitizers one type of 16 bits, which is accessed as the other is.
using StorageTypes = std::conditional_t<kSanitized, ::testing::Types<float, BFloat16>,
                                        ::testing::Types<float, BFloat16, Float16>>;
using HalfTypes =
    std::conditional_t<kSanitized, ::testing::Types<BFloat16>, ::testing::Types<BFloat16, Float16>>;

// Largest relative error of one rounding.
inline constexpr double kFloatRounding = 0x1p-24;

inline double RandomNormal(uint64_t seed, int64_t item) {
  return Normal({.seed = seed, .purpose = RandomPurpose::kData, .item = uint64_t(item)});
}

// The layout of a matrix in memory: `offset` elements before the first row, `gap` between two rows,
// `tail` after the last one.
struct MatrixLayout {
  int64_t offset = 3, gap = 3, tail = 3;
};
// Gaps and offsets that keep rows of whole vectors aligned to 16 bytes, and others. The allocation
// ends with the last element, so that AddressSanitizer finds accesses beyond it.
inline constexpr MatrixLayout kLayouts[] = {{0, 0, 0}, {0, 8, 0}, {8, 0, 0}, {1, 0, 0}, {0, 3, 0}};

// Layouts of two matrices of one operation: both aligned, one of them, or none.
struct LayoutPair {
  MatrixLayout in, out;
};
inline constexpr LayoutPair kLayoutPairs[] = {{kLayouts[0], kLayouts[1]},
                                              {kLayouts[1], kLayouts[2]},
                                              {kLayouts[2], kLayouts[3]},
                                              {kLayouts[3], kLayouts[4]},
                                              {kLayouts[4], kLayouts[0]}};

// A [rows, cols] matrix in host memory, with guards around its rows, which no operation may write.
template <typename T>
class Matrix {
 public:
  using Element = T;

  Matrix() : Matrix(0, 0) {}
  Matrix(int64_t rows, int64_t cols, float value = 0) : Matrix(rows, cols, MatrixLayout(), value) {}
  Matrix(int64_t rows, int64_t cols, MatrixLayout layout, float value = 0)
      : layout_(layout), rows_(rows), cols_(cols) {
    const int64_t last = rows == 0 || cols == 0 ? 0 : (rows - 1) * stride() + cols;
    data_.assign(size_t(layout.offset + last + layout.tail), Guard());
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) at(r, c) = T(value);
    }
  }
  // Standard normal values, a function of the seed and the element.
  static Matrix Random(int64_t rows, int64_t cols, uint64_t seed, double scale = 1) {
    return Random(rows, cols, MatrixLayout(), seed, scale);
  }
  static Matrix Random(int64_t rows, int64_t cols, MatrixLayout layout, uint64_t seed,
                       double scale = 1) {
    Matrix m(rows, cols, layout);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        m.at(r, c) = T(static_cast<float>(scale * RandomNormal(seed, r * cols + c)));
      }
    }
    return m;
  }
  // By rows.
  static Matrix Of(int64_t rows, int64_t cols, const std::vector<float>& values,
                   MatrixLayout layout = {}) {
    Matrix m(rows, cols, layout);
    for (int64_t i = 0; i < rows * cols; ++i) m.at(i / cols, i % cols) = T(values[size_t(i)]);
    return m;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t stride() const { return cols_ + layout_.gap; }
  T& at(int64_t r, int64_t c) { return data_[size_t(layout_.offset + r * stride() + c)]; }
  const T& at(int64_t r, int64_t c) const { return const_cast<Matrix*>(this)->at(r, c); }
  double operator()(int64_t r, int64_t c) const { return static_cast<float>(at(r, c)); }

  MatrixView<T> view() { return {data_.data() + layout_.offset, rows_, cols_, stride()}; }
  MatrixView<const T> view() const {
    return {data_.data() + layout_.offset, rows_, cols_, stride()};
  }
  // Rows [begin, end) alone.
  MatrixView<T> view(int64_t begin, int64_t end) { return RowRange(view(), begin, end); }
  MatrixView<const T> view(int64_t begin, int64_t end) const {
    return RowRange(view(), begin, end);
  }

  bool edges_intact() const {
    const int64_t size = static_cast<int64_t>(data_.size());
    for (int64_t i = 0; i < size; ++i) {
      const int64_t at = i - layout_.offset;
      const bool inside = at >= 0 && cols_ > 0 && at % stride() < cols_ && at / stride() < rows_;
      if (!inside && static_cast<float>(data_[i]) != static_cast<float>(Guard())) return false;
    }
    return true;
  }

  std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) all.push_back((*this)(r, c));
    }
    return all;
  }
  // Copies of some rows, of some columns.
  Matrix Rows(int64_t begin, int64_t end) const { return Part(begin, end, 0, cols_); }
  Matrix Cols(int64_t begin, int64_t end) const { return Part(0, rows_, begin, end); }
  // The same values in another type.
  template <typename U>
  Matrix<U> As() const {
    Matrix<U> m(rows_, cols_, layout_);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) m.at(r, c) = U(static_cast<float>(at(r, c)));
    }
    return m;
  }

  // All owned memory, guards included: copies to a device and back transfer it.
  const MatrixLayout& layout() const { return layout_; }
  const std::vector<T>& memory() const { return data_; }
  std::vector<T>& memory() { return data_; }

 private:
  static T Guard() { return T(-7777.0f); }
  Matrix Part(int64_t top, int64_t bottom, int64_t left, int64_t right) const {
    Matrix m(bottom - top, right - left, layout_);
    for (int64_t r = top; r < bottom; ++r) {
      for (int64_t c = left; c < right; ++c) m.at(r - top, c - left) = at(r, c);
    }
    return m;
  }

  MatrixLayout layout_;
  int64_t rows_, cols_;
  std::vector<T> data_;
};

template <typename T>
bool SameBits(const T& a, const T& b) {
  using Bytes = std::array<unsigned char, sizeof(T)>;
  return std::bit_cast<Bytes>(a) == std::bit_cast<Bytes>(b);
}

// Same shape and same bits, row by row, and intact guards; the rows of `b` begin at its row
// `first`.
template <typename T>
::testing::AssertionResult SameBits(const Matrix<T>& a, const Matrix<T>& b, int64_t first = 0) {
  if (a.cols() != b.cols() || a.rows() + first > b.rows()) {
    return ::testing::AssertionFailure() << "shapes differ";
  }
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t c = 0; c < a.cols(); ++c) {
      if (!SameBits(a.at(r, c), b.at(first + r, c))) {
        return ::testing::AssertionFailure()
               << "(" << r << ", " << c << "): " << a(r, c) << " and " << b(first + r, c);
      }
    }
  }
  if (a.edges_intact() && b.edges_intact()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "memory around the rows was written";
}

// Printed on failure.
template <typename T>
double AsDouble(T value) {
  if constexpr (std::is_arithmetic_v<T>) return static_cast<double>(value);
  return static_cast<float>(value);
}

template <typename T>
::testing::AssertionResult SameBits(const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() != b.size()) return ::testing::AssertionFailure() << "lengths differ";
  for (size_t i = 0; i < a.size(); ++i) {
    if (!SameBits(a[i], b[i])) {
      return ::testing::AssertionFailure()
             << "[" << i << "]: " << AsDouble(a[i]) << " and " << AsDouble(b[i]);
    }
  }
  return ::testing::AssertionSuccess();
}

// As SameBits, including guards of matrices, except that NaNs may differ.
inline bool SameNumbers(const std::vector<float>& a, const std::vector<float>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](float x, float y) {
    return SameBits(x, y) || (std::isnan(x) && std::isnan(y));
  });
}
inline bool SameNumbers(const Matrix<float>& a, const Matrix<float>& b) {
  return SameNumbers(a.memory(), b.memory());
}

// Few distinct values, so that most rows have ties; every special value among them.
inline Matrix<float> WithTies(int64_t rows, int64_t cols, MatrixLayout layout, uint64_t seed) {
  const float values[] = {0.0f,      -0.0f,      1.0f, 1.0f,  -1.0f, 2.0f,
                          kInfinity, -kInfinity, kNaN, -kNaN, 1e-45f};
  Matrix<float> m(rows, cols, layout);
  for (int64_t i = 0; i < rows * cols; ++i) {
    m.at(i / cols, i % cols) =
        values[Random4({.seed = seed, .item = uint64_t(i)})[0] % std::size(values)];
  }
  return m;
}

inline std::vector<float> RandomFloats(int64_t n, uint64_t seed, double scale = 1) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(scale * RandomNormal(seed, i));
  return x;
}

// Operations use the named SIMD target while an object lives.
class SimdTarget {
 public:
  explicit SimdTarget(const std::string& name) { gemm::UseSimdTarget(name); }
  ~SimdTarget() { gemm::UseSimdTarget(""); }
  SimdTarget(const SimdTarget&) = delete;
  SimdTarget& operator=(const SimdTarget&) = delete;
};

inline std::string Message(const absl::Status& status) {
  return std::string(status.message());
}

// kInvalidArgument with this message.
inline void ExpectRefused(const absl::Status& status,
                          const ::testing::Matcher<std::string>& message) {
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(Message(status), message);
}

inline ::testing::AssertionResult IsOk(const absl::Status& status) {
  if (status.ok()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << status;
}
template <typename T>
::testing::AssertionResult IsOk(const absl::StatusOr<T>& result) {
  return IsOk(result.status());
}
#define EXPECT_OK(...) EXPECT_TRUE(::moe::testing::IsOk(__VA_ARGS__))
#define ASSERT_OK(...) ASSERT_TRUE(::moe::testing::IsOk(__VA_ARGS__))

// Work that must not fail.
template <typename Work>
void EnqueueWork(Stream& stream, Work work) {
  ASSERT_OK(stream.Enqueue([work = std::move(work)]() mutable {
    work();
    return absl::OkStatus();
  }));
}

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_OP_TEST_H_
