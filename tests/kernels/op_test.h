// What the tests of single operations share: matrices with guarded edges, streams, comparisons.
#ifndef MOE_TESTS_KERNELS_OP_TEST_H_
#define MOE_TESTS_KERNELS_OP_TEST_H_

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/rng.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/simd_targets.h"

namespace moe::testing {

inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Largest relative error of one rounding.
inline constexpr double kFloatRounding = 0x1p-24;

inline double RandomNormal(uint64_t seed, int64_t item) {
  return Normal({.seed = seed, .purpose = RandomPurpose::kData, .item = uint64_t(item)});
}

// A [rows, cols] matrix with `kPad` more elements a row and as many after the end, which no
// operation may touch.
template <typename T>
class Matrix {
 public:
  static constexpr int64_t kPad = 3;

  Matrix(int64_t rows, int64_t cols, float value = 0)
      : rows_(rows), cols_(cols), data_(size_t(rows * (cols + kPad) + kPad), Guard()) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) at(r, c) = T(value);
    }
  }
  static Matrix Random(int64_t rows, int64_t cols, uint64_t seed, double scale = 1) {
    Matrix m(rows, cols);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) {
        m.at(r, c) = T(static_cast<float>(scale * RandomNormal(seed, r * cols + c)));
      }
    }
    return m;
  }

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  T& at(int64_t r, int64_t c) { return data_[size_t(kPad + r * (cols_ + kPad) + c)]; }
  const T& at(int64_t r, int64_t c) const { return const_cast<Matrix*>(this)->at(r, c); }
  double operator()(int64_t r, int64_t c) const { return static_cast<float>(at(r, c)); }

  MatrixView<T> view() { return {data_.data() + kPad, rows_, cols_, cols_ + kPad}; }
  MatrixView<const T> view() const { return {data_.data() + kPad, rows_, cols_, cols_ + kPad}; }
  // Rows [begin, end) alone.
  MatrixView<T> view(int64_t begin, int64_t end) { return RowRange(view(), begin, end); }
  MatrixView<const T> view(int64_t begin, int64_t end) const {
    return RowRange(view(), begin, end);
  }

  bool edges_intact() const {
    for (size_t i = 0; i < data_.size(); ++i) {
      const bool inside = i >= kPad && (i - kPad) % size_t(cols_ + kPad) < size_t(cols_) &&
                          (i - kPad) / size_t(cols_ + kPad) < size_t(rows_);
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
  // The same values in another type.
  template <typename U>
  Matrix<U> As() const {
    Matrix<U> m(rows_, cols_);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c) m.at(r, c) = U(static_cast<float>(at(r, c)));
    }
    return m;
  }

 private:
  static T Guard() { return T(-7777.0f); }

  int64_t rows_, cols_;
  std::vector<T> data_;
};

template <typename T>
bool SameBits(const T& a, const T& b) {
  using Bytes = std::array<unsigned char, sizeof(T)>;
  return std::bit_cast<Bytes>(a) == std::bit_cast<Bytes>(b);
}

// Same shape and same bits, row by row; `rows_of_b` begins at b's row `first`.
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
  return ::testing::AssertionSuccess();
}

// What a failure prints.
template <typename T>
double AsDouble(T value) {
  return static_cast<double>(value);
}
inline double AsDouble(BFloat16 value) {
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

inline std::vector<float> RandomFloats(int64_t n, uint64_t seed, double scale = 1) {
  std::vector<float> x(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) x[i] = static_cast<float>(scale * RandomNormal(seed, i));
  return x;
}

// An inline stream with its own threads.
class TestStream {
 public:
  explicit TestStream(int threads = 1) : pool_(threads), stream_(MakeInlineStream(&pool_)) {}
  Stream& operator*() { return *stream_; }

 private:
  ThreadPool pool_;
  std::unique_ptr<Stream> stream_;
};

// Operations use the named SIMD target while this lives.
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

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_OP_TEST_H_
