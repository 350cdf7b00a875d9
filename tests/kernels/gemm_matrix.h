// Matrices and expected values that the tests of products share.
#ifndef MOE_TESTS_KERNELS_GEMM_MATRIX_H_
#define MOE_TESTS_KERNELS_GEMM_MATRIX_H_

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"

namespace moe {

template <typename T>
auto Bits(T value) {
  if constexpr (std::is_same_v<T, float>) {
    return std::bit_cast<uint32_t>(value);
  } else {
    return value.bits;
  }
}

// A matrix with `pad` NaNs after each row: read by mistake they spread, and their bits show whether
// an output was written past its end.
template <typename T>
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, int64_t pad = 0)
      : rows_(rows),
        cols_(cols),
        stride_(cols + pad),
        data_(static_cast<size_t>(rows * stride_), T(std::numeric_limits<float>::quiet_NaN())) {}

  // Mixed signs and magnitudes over 2^-8 .. 2^8, so that sums in another order differ in bits.
  static Matrix Random(int64_t rows, int64_t cols, int64_t pad, uint32_t seed) {
    Matrix m(rows, cols, pad);
    std::minstd_rand engine(seed * 7919 + 1);
    std::normal_distribution<float> normal;
    std::uniform_int_distribution<int> exponent(-8, 8);
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < cols; ++c) m(r, c) = T(std::ldexp(normal(engine), exponent(engine)));
    }
    return m;
  }

  T& operator()(int64_t r, int64_t c) { return data_[static_cast<size_t>(r * stride_ + c)]; }
  float at(int64_t r, int64_t c) const {
    return static_cast<float>(data_[static_cast<size_t>(r * stride_ + c)]);
  }
  MatrixView<T> view() { return {data_.data(), rows_, cols_, stride_}; }
  MatrixView<const T> cview() const { return {data_.data(), rows_, cols_, stride_}; }
  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }

  // The number of elements, padding included, whose bits differ.
  int64_t Differences(const Matrix& other) const {
    int64_t count = 0;
    for (size_t i = 0; i < data_.size(); ++i) count += Bits(data_[i]) != Bits(other.data_[i]);
    return count;
  }

 private:
  int64_t rows_, cols_, stride_;
  std::vector<T> data_;
};

// Rows per group and their matrices, for either direction.
template <typename T>
struct Groups {
  std::vector<int64_t> offsets = {0};
  std::vector<Matrix<T>> weight;

  Groups(absl::Span<const int64_t> rows, int64_t out, int64_t in) {
    for (const int64_t r : rows) {
      offsets.push_back(offsets.back() + r);
      const auto seed = static_cast<uint32_t>(offsets.size());
      weight.push_back(Matrix<T>::Random(out, in, seed % 3, 1000 + seed));
    }
  }
  int64_t total() const { return offsets.back(); }
  std::vector<MatrixView<const T>> views() const {
    std::vector<MatrixView<const T>> v;
    for (const Matrix<T>& w : weight) v.push_back(w.cview());
    return v;
  }
};

// The specification, written out: std::fma in ascending order, and for BFloat16 the second of two
// terms first, an odd last one beside zeros. a(k), b(k): the factors of term k, as float.
template <typename T, class A, class B>
float Chain(int64_t depth, float sum, const A& a, const B& b) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    for (int64_t k = 0; k < depth; k += 2) {
      sum = k + 1 < depth ? std::fma(a(k + 1), b(k + 1), sum) : std::fma(0.0f, 0.0f, sum);
      sum = std::fma(a(k), b(k), sum);
    }
  } else {
    for (int64_t k = 0; k < depth; ++k) sum = std::fma(a(k), b(k), sum);
  }
  return sum;
}

// Products, element by element.
template <typename T, typename TOut>
Matrix<TOut> Expected(const Matrix<T>& x, const Groups<T>& groups, bool transposed, int64_t pad) {
  const int64_t cols = transposed ? groups.weight[0].rows() : groups.weight[0].cols();
  Matrix<TOut> y(x.rows(), cols, pad);
  for (size_t g = 0; g < groups.weight.size(); ++g) {
    const Matrix<T>& w = groups.weight[g];
    for (int64_t n = groups.offsets[g]; n < groups.offsets[g + 1]; ++n) {
      for (int64_t c = 0; c < cols; ++c) {
        y(n, c) = TOut(Chain<T>(
            x.cols(), 0.0f, [&](int64_t k) { return x.at(n, k); },
            [&](int64_t k) { return transposed ? w.at(c, k) : w.at(k, c); }));
      }
    }
  }
  return y;
}

}  // namespace moe

#endif  // MOE_TESTS_KERNELS_GEMM_MATRIX_H_
