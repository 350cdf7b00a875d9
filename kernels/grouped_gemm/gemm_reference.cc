#include <cmath>
#include <optional>
#include <type_traits>

#include "kernels/grouped_gemm/gemm_blocks.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe::gemm {
namespace {

// vdpbf16ps reads subnormal numbers as zeros, and returns zeros instead of them.
float Flush(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? std::copysign(0.0f, value) : value;
}

template <typename T>
float MultiplyAdd(T x, T y, float sum) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return Flush(std::fma(Flush(static_cast<float>(x)), Flush(static_cast<float>(y)), Flush(sum)));
  } else {
    return std::fma(static_cast<float>(x), static_cast<float>(y), sum);
  }
}

template <typename T>
float Add(float left, float right) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return Flush(Flush(left) + Flush(right));
  } else {
    return left + right;
  }
}

// Accumulates an element's terms in order: chains of kChainWords words, each from 0 on, added up in
// order.
template <typename T>
class ChainSum {
 public:
  explicit ChainSum(std::optional<float> old = std::nullopt) : sum_(old) {}

  // a(k), b(k): the factors of term k.
  template <class A, class B>
  void AddRun(int64_t terms, const A& a, const B& b) {
    for (int64_t word = 0; word < terms; word += kStepsPerWord<T>) {
      for (int64_t k = word + kStepsPerWord<T> - 1; k >= word; --k) {
        const bool filled_up = k == terms;
        chain_ = MultiplyAdd(filled_up ? T(0.0f) : a(k), filled_up ? T(0.0f) : b(k), chain_);
      }
      if (++words_ == kChainWords) EndChain();
    }
  }
  // No value without terms and old value.
  std::optional<float> Result() {
    if (words_ > 0) EndChain();
    return sum_;
  }

 private:
  void EndChain() {
    sum_ = sum_ ? gemm::Add<T>(*sum_, chain_) : chain_;
    chain_ = 0;
    words_ = 0;
  }

  std::optional<float> sum_;
  float chain_ = 0;
  int64_t words_ = 0;
};

// The same in the order of tiles: blocks of kTerms terms, added up from 0 on. In a block even terms
// are a chain from 0 on, odd ones another.
class BlockSum {
 public:
  explicit BlockSum(std::optional<float> old = std::nullopt) : sum_(old) {}

  template <class A, class B>
  void AddRun(int64_t terms, const A& a, const B& b) {
    const BFloat16 zero(0.0f);
    for (int64_t begin = 0; begin < terms; begin += kTerms) {
      float chain[2] = {};
      for (int64_t k = begin; k < begin + kTerms; ++k) {
        chain[k % 2] = MultiplyAdd(k < terms ? a(k) : zero, k < terms ? b(k) : zero, chain[k % 2]);
      }
      sum_ = Add<BFloat16>(sum_.value_or(0.0f), Add<BFloat16>(chain[0], chain[1]));
    }
  }
  std::optional<float> Result() const { return sum_; }

 private:
  std::optional<float> sum_;
};

// The node over leaves [first, last), given `leaf(s)`; no value if all are empty.
template <typename T, class Leaf>
std::optional<float> Node(const Leaf& leaf, int first, int last) {
  if (last - first == 1) return leaf(first);
  const int middle = (first + last) / 2;
  const std::optional<float> left = Node<T>(leaf, first, middle);
  const std::optional<float> right = Node<T>(leaf, middle, last);
  if (!left || !right) return left ? left : right;
  return Add<T>(*left, *right);
}

// Element (k, j) of packed weights in the order of tiles.
template <typename TOut>
BFloat16 TileStripElement(const Problem<BFloat16, TOut>& problem, int64_t k, int64_t j) {
  const int64_t steps = TreeSteps(problem.tree, problem.depth());
  BFloat16 element;
  DepthBlocks(problem).ForEach([&](const DepthBlock& depth) {
    for (const TermRun& run : depth.terms()) {
      if (k < run.k || k >= run.k + run.terms) continue;
      const int64_t step = j / kStripSide * steps + depth.steps_before + run.step;
      element = problem.b.row(step)[RightIndex(k - run.k, j % kStripSide)];
    }
  });
  return element;
}

template <class Sum, typename T, typename TOut>
void ReferenceOf(const Problem<T, TOut>& problem) {
  // By name: Clang before 16 captures no structured bindings.
  const MatrixView<const T> a = problem.a, b = problem.b;
  const MatrixView<TOut> c = problem.c;
  const Layout a_layout = problem.a_layout, b_layout = problem.b_layout;
  const GemmTree& tree = problem.tree;
  const auto b_at = [&](int64_t k, int64_t j) {
    if (b_layout == Layout::kPlain) return b(k, j);
    if (b_layout == Layout::kTransposed) return b(j, k);
    if constexpr (std::is_same_v<Sum, BlockSum>) {
      return TileStripElement(problem, k, j);
    } else {
      constexpr int64_t kPair = kStepsPerWord<T>;
      const int64_t word = j / b.cols() * WordsOf<T>(problem.depth()) + k / kPair;
      return b.data()[(word * b.cols() + j % b.cols()) * kPair + k % kPair];
    }
  };
  const auto a_at = [&](int64_t i, int64_t k) {
    return a_layout == Layout::kPlain ? a(i, k) : a(k, i);
  };
  const auto add = [&](int64_t i, int64_t j, int64_t begin, int64_t end, Sum& sum) {
    sum.AddRun(
        end - begin, [&](int64_t k) { return a_at(i, begin + k); },
        [&](int64_t k) { return b_at(begin + k, j); });
  };
  const auto root = [&](int64_t i, int64_t j) {
    const auto leaf = [&](int s) {
      const int64_t begin = tree.cut.Begin(s), end = tree.cut.Begin(s + 1);
      Sum sum;
      for (int part = 0; part < tree.parts; ++part) {
        const int64_t first = tree.Begin(part), times = tree.Times(part);
        add(i, j, first + times * begin, first + times * end, sum);
      }
      return sum.Result();
    };
    return Node<T>(leaf, 0, tree.cut.leaves);
  };
  const auto all = [&](int64_t i, int64_t j) {
    Sum sum(problem.write == Write::kAdd ? std::optional(static_cast<float>(c(i, j)))
                                         : std::nullopt);
    add(i, j, 0, problem.depth(), sum);
    return sum.Result();
  };
  for (int64_t i = 0; i < c.rows(); ++i) {
    for (int64_t j = 0; j < c.cols(); ++j) {
      c(i, j) = static_cast<TOut>((problem.is_tree() ? root(i, j) : all(i, j)).value_or(0.0f));
    }
  }
}

}  // namespace

template <typename T, typename TOut>
void Reference(const Problem<T, TOut>& problem) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (problem.is_tile_order()) return ReferenceOf<BlockSum>(problem);
  }
  ReferenceOf<ChainSum<T>>(problem);
}

#define MOE_INSTANTIATE(T, TOut) template void Reference(const Problem<T, TOut>&);
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe::gemm
