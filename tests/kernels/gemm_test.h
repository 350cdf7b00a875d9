// Shared by the tests of matrix products: matrices, expected values, devices and kernels.
#ifndef MOE_TESTS_KERNELS_GEMM_TEST_H_
#define MOE_TESTS_KERNELS_GEMM_TEST_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/types/span.h>
#include <gtest/gtest.h>

#include "kernels/base/dtype.h"
#include "kernels/base/tensor_view.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "tests/kernels/device_memory.h"

namespace moe::testing {

// `pad` elements between rows.
inline MatrixLayout Padded(int64_t pad) {
  return {.offset = 0, .gap = pad, .tail = pad};
}

// An output: NaN in every element.
template <typename T>
Matrix<T> Unwritten(int64_t rows, int64_t cols, int64_t pad = 0) {
  return Matrix<T>(rows, cols, Padded(pad), kNaN);
}

// Mixed signs and magnitudes over 2^-8 .. 2^8, so that sums in another order have other bits.
template <typename T>
Matrix<T> Mixed(int64_t rows, int64_t cols, MatrixLayout layout, uint32_t seed) {
  Matrix<T> m(rows, cols, layout);
  std::minstd_rand engine(seed * 7919 + 1);
  std::normal_distribution<float> normal;
  std::uniform_int_distribution<int> exponent(-8, 8);
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      m.at(r, c) = T(std::ldexp(normal(engine), exponent(engine)));
    }
  }
  return m;
}

template <typename T>
Matrix<T> Mixed(int64_t rows, int64_t cols, int64_t pad, uint32_t seed) {
  return Mixed<T>(rows, cols, Padded(pad), seed);
}

// Rows per group and their matrices, for either direction.
template <typename T>
struct Groups {
  std::vector<int64_t> offsets = {0};
  std::vector<Matrix<T>> weight;

  Groups(absl::Span<const int64_t> rows, int64_t out, int64_t in,
         std::optional<MatrixLayout> layout = std::nullopt) {
    for (const int64_t r : rows) {
      offsets.push_back(offsets.back() + r);
      const auto seed = static_cast<uint32_t>(offsets.size());
      weight.push_back(Mixed<T>(out, in, layout.value_or(Padded(seed % 3)), 1000 + seed));
    }
  }
  int64_t total() const { return offsets.back(); }
  std::vector<MatrixView<const T>> views() const {
    std::vector<MatrixView<const T>> v;
    for (const Matrix<T>& w : weight) v.push_back(w.view());
    return v;
  }
};

// The groups' matrices in memory of a device: one slab, aligned to 16 bytes if the layout is.
template <typename T>
struct DeviceWeights {
  DeviceArray<T> memory;
  std::vector<MatrixView<const T>> views;
};
template <typename T>
DeviceWeights<T> WeightsOn(const TestDevice& device, const Groups<T>& groups) {
  std::vector<T> all;
  std::vector<size_t> begins;
  for (const Matrix<T>& w : groups.weight) {
    all.resize((all.size() + 7) / 8 * 8);
    begins.push_back(all.size() + static_cast<size_t>(w.layout().offset));
    all.insert(all.end(), w.memory().begin(), w.memory().end());
  }
  DeviceWeights<T> weights = {device.Copy(all), {}};
  for (size_t g = 0; g < begins.size(); ++g) {
    const MatrixView<const T> w = groups.weight[g].view();
    weights.views.push_back(
        {weights.memory.span().data() + begins[g], w.rows(), w.cols(), w.stride()});
  }
  return weights;
}

// In place of BFloat16: its products in the order of tiles.
struct BFloat16Tiles {};
template <typename Kind>
struct Storage {
  using Type = Kind;
};
template <>
struct Storage<BFloat16Tiles> {
  using Type = BFloat16;
};

// The specification, written out: std::fma in ascending order in chains of 128 terms, for BFloat16
// of 256 with the second of each pair first, an odd last one paired with zero; the chains' sums
// added in order. In tiles blocks of 32 terms, filled up with zeros, are added in order from 0 on,
// even and odd terms each a chain.
template <typename T>
class Chains {
 public:
  Chains() = default;
  explicit Chains(float old) : sum_(old), begun_(true) {}

  // a(k), b(k): the factors of term k, as float.
  template <class A, class B>
  void Add(int64_t depth, const A& a, const B& b) {
    for (int64_t k = 0; k < depth; ++k) {
      if constexpr (std::is_same_v<T, BFloat16Tiles>) {
        float chains[2] = {};
        for (int64_t i = 0; i < 32; ++i, ++k) {
          chains[i % 2] = std::fma(k < depth ? a(k) : 0.0f, k < depth ? b(k) : 0.0f, chains[i % 2]);
        }
        --k;
        sum_ += chains[0] + chains[1];
        continue;
      }
      if constexpr (std::is_same_v<T, BFloat16>) {
        chain_ =
            k + 1 < depth ? std::fma(a(k + 1), b(k + 1), chain_) : std::fma(0.0f, 0.0f, chain_);
        chain_ = std::fma(a(k), b(k), chain_);
        ++k;
      } else {
        chain_ = std::fma(a(k), b(k), chain_);
      }
      if (++words_ == 128) End();
    }
  }
  float Sum() {
    if (words_ > 0) End();
    return sum_;
  }

 private:
  void End() {
    sum_ = begun_ ? sum_ + chain_ : chain_;
    begun_ = true;
    chain_ = 0;
    words_ = 0;
  }

  float sum_ = 0;
  bool begun_ = false;
  float chain_ = 0;
  int words_ = 0;
};

template <typename T, class A, class B>
float SumOfChains(int64_t depth, std::optional<float> old, const A& a, const B& b) {
  auto sum = old ? Chains<T>(*old) : Chains<T>();
  sum.Add(depth, a, b);
  return sum.Sum();
}

// A tree, written out: leaves [first, last), each a list of its chains' terms in order.
template <typename T, class A, class B>
std::optional<float> TreeNodeOf(const GemmTree& tree, int first, int last, const A& a, const B& b) {
  if (last - first > 1) {
    const int middle = (first + last) / 2;
    const auto left = TreeNodeOf<T>(tree, first, middle, a, b);
    const auto right = TreeNodeOf<T>(tree, middle, last, a, b);
    return left && right ? *left + *right : left ? left : right;
  }
  const int64_t items = (tree.cut.extent + tree.cut.item - 1) / tree.cut.item;
  const int64_t begin = items * first / tree.cut.leaves * tree.cut.item;
  const int64_t end = std::min(items * last / tree.cut.leaves * tree.cut.item, tree.cut.extent);
  if (begin >= end) return std::nullopt;
  Chains<T> sum;
  int64_t part_begin = 0;
  for (int part = 0; part < tree.parts; ++part) {
    const int64_t times = part == 0 ? tree.first_times : 1;
    const int64_t from = part_begin + times * begin;
    sum.Add(
        times * (end - begin), [&](int64_t k) { return a(from + k); },
        [&](int64_t k) { return b(from + k); });
    part_begin += times * tree.cut.extent;
  }
  return sum.Sum();
}

// Trees over an index cut into `parts` parts, the first `first_times` as long as the others, or
// into one part if that leaves a remainder.
struct Trees {
  int leaves = 1;
  int64_t item = 1;
  int parts = 1;
  int64_t first_times = 1;

  GemmTree Of(int64_t extent) const {
    const int64_t lengths = first_times + parts - 1;
    if (extent % lengths != 0) return {{leaves, extent, item}};
    return {{leaves, extent / lengths, item}, parts, first_times};
  }
  // Whether leaves of packed bfloat16 begin with whole pairs.
  bool WholePairs(int64_t extent) const {
    const GemmTree tree = Of(extent);
    for (int part = 0; part < tree.parts; ++part) {
      for (int s = 0; s < leaves; ++s) {
        const int64_t begin = tree.Begin(part) + tree.Times(part) * tree.cut.Begin(s);
        if (begin % 2 != 0 && begin < extent) return false;
      }
    }
    return true;
  }
};

// Products, element by element.
template <typename Kind, typename TOut, typename T = typename Storage<Kind>::Type>
Matrix<TOut> Expected(const Matrix<T>& x, const Groups<T>& groups, bool transposed, int64_t pad,
                      const GemmTree& tree = {}) {
  const int64_t cols = transposed ? groups.weight[0].rows() : groups.weight[0].cols();
  auto y = Unwritten<TOut>(x.rows(), cols, pad);
  for (size_t g = 0; g < groups.weight.size(); ++g) {
    const Matrix<T>& w = groups.weight[g];
    for (int64_t n = groups.offsets[g]; n < groups.offsets[g + 1]; ++n) {
      for (int64_t c = 0; c < cols; ++c) {
        const auto at_a = [&](int64_t k) {
          return static_cast<float>(x.at(n, k));
        };
        const auto at_b = [&](int64_t k) {
          return static_cast<float>(transposed ? w.at(c, k) : w.at(k, c));
        };
        y.at(n, c) =
            TOut(tree.cut.leaves == 1
                     ? SumOfChains<Kind>(x.cols(), std::nullopt, at_a, at_b)
                     : TreeNodeOf<Kind>(tree, 0, tree.cut.leaves, at_a, at_b).value_or(0.0f));
      }
    }
  }
  return y;
}

// A device, and the implementation of products there.
struct Path {
  std::unique_ptr<TestDevice> device;
  std::unique_ptr<Cublas> cublas;
  GemmOptions options;

  bool HasBitsOfFloat() const { return cublas == nullptr; }
  ::testing::Message name() const {
    return ::testing::Message() << device->name() << (cublas == nullptr ? "" : ", cuBLAS");
  }
};

inline std::vector<Path> Paths() {
  std::vector<Path> paths;
  for (auto& device : TestDevices()) paths.push_back({.device = std::move(device)});
  const Device last = paths.back().device->stream().device();
  if (auto cublas = MakeCublas(GroupedGemmKernel::kCublas, RowBits::kMayDependOnCount, last);
      cublas.ok()) {
    const GemmOptions options = {GroupedGemmKernel::kCublas, cublas->get()};
    paths.push_back({std::make_unique<TestDevice>(last), *std::move(cublas), options});
  }
  return paths;
}

// Each addition has an error of at most 2^-23 of a partial sum (grouped_gemm_cuda.h; half of that,
// also for each product, where sums are rounded to nearest); a result in bfloat16, of 8 bits, of
// 2^-8 of itself, one in float16, of 11, of 2^-11, below the normal numbers of 2^-25.
template <typename T, typename TOut>
void ExpectInBound(const gemm::Problem<T, TOut>& problem, const Matrix<TOut>& got) {
  const auto& [a, b, old, a_layout, b_layout, write, order, tree, exact] = problem;
  for (int64_t i = 0; i < got.rows(); ++i) {
    for (int64_t j = 0; j < got.cols(); ++j) {
      double sum = write == Write::kAdd ? double{static_cast<float>(old(i, j))} : 0.0;
      double magnitudes = std::abs(sum);
      for (int64_t k = 0; k < problem.depth(); ++k) {
        const double term =
            double{static_cast<float>(a_layout == gemm::Layout::kPlain ? a(i, k) : a(k, i))} *
            double{static_cast<float>(b_layout == gemm::Layout::kPlain ? b(k, j) : b(j, k))};
        sum += term;
        magnitudes += std::abs(term);
      }
      const double bound = std::ldexp(static_cast<double>(problem.depth() + 1), -23) * magnitudes;
      constexpr bool kHalf = std::is_same_v<TOut, Float16>;
      const double most = std::abs(sum) + bound;
      if (kHalf && most > 65504) {  // beyond the largest number, or close
        ASSERT_GE(std::abs(got(i, j)), 65472) << i << " " << j;
        continue;
      }
      const double rounding = std::is_same_v<TOut, float> ? 0.0
                              : kHalf                     ? std::ldexp(most, -11) + 0x1p-25
                                                          : std::ldexp(most, -8);
      ASSERT_NEAR(got(i, j), sum, bound + rounding) << i << " " << j;
    }
  }
}

// `got` is the output, which was `old` before.
template <typename T, typename TOut>
void ExpectProduct(const Path& path, gemm::Problem<T, TOut> problem, const Matrix<TOut>& old,
                   Matrix<TOut> got) {
  Matrix<TOut> want = old;
  problem.c = want.view();
  if (std::is_same_v<T, float> && path.HasBitsOfFloat()) {
    gemm::Reference<T, TOut>(problem);
  } else {
    ExpectInBound(problem, got);
    for (int64_t r = 0; r < got.rows(); ++r) {
      std::copy_n(got.view().row(r), got.cols(), want.view().row(r));
    }
  }
  EXPECT_TRUE(SameBits(got, want)) << "elements, those beside the rows included";
}

// Layouts of the two inputs and of the output. On CUDA copies are asynchronous if all rows begin at
// multiples of 16 bytes.
struct Layouts {
  MatrixLayout in, weight, out;
};
inline constexpr Layouts kAligned = {kLayouts[0], kLayouts[1], kLayouts[0]};

}  // namespace moe::testing

#endif  // MOE_TESTS_KERNELS_GEMM_TEST_H_
