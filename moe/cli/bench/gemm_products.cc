// The three products of an expert layer, with their data and checks.

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <numeric>
#include <type_traits>

#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "moe/cli/bench/gemm_bench.h"
#include "moe/cli/bench/kernel_device.h"

namespace moe::bench {
namespace {

// An element's sum of products.
struct GemmSum {
  float chain = 0;  // the reference: one fused multiply-add for each term (grouped_gemm.h)
  double exact = 0;
  double magnitudes = 0;  // sum of |a b|
  int64_t depth = 0;
};
template <typename T, typename Pair>
GemmSum Sum(int64_t begin, int64_t end, Pair pair) {
  GemmSum sum{.depth = end - begin};
  const auto add = [&](int64_t i) {
    const auto [a, b] = pair(i);
    const auto x = static_cast<float>(a);
    const auto y = static_cast<float>(b);
    sum.chain = std::fma(x, y, sum.chain);
    const double product = static_cast<double>(x) * static_cast<double>(y);
    sum.exact += product;
    sum.magnitudes += std::abs(product);
  };
  if constexpr (std::is_same_v<T, BFloat16>) {  // the second of two terms goes first
    for (int64_t i = begin; i < end; i += 2) {
      if (i + 1 < end) add(i + 1);
      add(i);
    }
  } else {
    for (int64_t i = begin; i < end; ++i) add(i);
  }
  return sum;
}

// Tensor cores add in an order of their own: within (depth + 1) x 2^-23 of the sum of magnitudes,
// and then rounded to the result's type.
template <typename T>
bool WithinTensorCores(const GemmSum& sum, T result) {
  const double off = static_cast<double>(sum.depth + 1) * 0x1p-23 * sum.magnitudes;
  constexpr bool kHalf = std::is_same_v<T, Float16>;
  const double rounding = std::is_same_v<T, float> ? 0x1p-24 : kHalf ? 0x1p-11 : 0x1p-8;
  const double underflow = kHalf ? 0x1p-25 : 0;
  const double error = static_cast<double>(static_cast<float>(result)) - sum.exact;
  return std::abs(error) <= off + rounding * (std::abs(sum.exact) + off) + underflow;
}

// Operands and results of the three products.
template <typename T>
class Products final : public KernelCases {
 public:
  Products(const GemmSpec& spec, KernelDevice& device)
      : spec_(spec), device_(device), workspace_(device.memory()) {}

  absl::Status Setup() {
    int64_t n = 0;  // of the largest call
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec_, call));
      n = std::max(n, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    }
    const int64_t weights = spec_.num_experts * spec_.ffn * spec_.hidden;
    MOE_ASSIGN_OR_RETURN(x_, UniformValues<T>(n * spec_.hidden, spec_.seed, 0, device_, "x"));
    MOE_ASSIGN_OR_RETURN(dy_, UniformValues<T>(n * spec_.ffn, spec_.seed, 1, device_, "dy"));
    MOE_ASSIGN_OR_RETURN(w_, UniformValues<T>(weights, spec_.seed, 2, device_, "weights"));
    MOE_ASSIGN_OR_RETURN(y_, Mirrored<T>::Allocate(n * spec_.ffn, device_, "y"));
    MOE_ASSIGN_OR_RETURN(dx_, Mirrored<T>::Allocate(n * spec_.hidden, device_, "dx"));
    MOE_ASSIGN_OR_RETURN(dw_, Mirrored<float>::Allocate(weights, device_, "weight gradients"));
    for (int e = 0; e < spec_.num_experts; ++e) weight_.push_back(WeightOf<const T>(w_, e));
    Add("forward", &Products::Forward, &Products::WrongForward, y_.bytes());
    Add("input_grad", &Products::InputGradient, &Products::WrongInputGradient, dx_.bytes());
    Add("weight_grad", &Products::WeightGradient, &Products::WrongWeightGradient, dw_.bytes());
    return absl::OkStatus();
  }

 private:
  void Add(const char* product, absl::Status (Products::*run)(),
           absl::StatusOr<int64_t> (Products::*wrong)() const, absl::Span<std::byte> result) {
    const auto prepare = [this](int64_t call) -> absl::StatusOr<double> {
      MOE_RETURN_IF_ERROR(Group(call % CallsOf(spec_.routing)));
      return 2.0 * static_cast<double>(offsets_.back()) * static_cast<double>(spec_.hidden) *
             static_cast<double>(spec_.ffn);
    };
    const auto scoped_run = [this, run]() -> absl::Status {
      const WorkspaceScope scratch(workspace_);
      return (this->*run)();
    };
    cases_.push_back({.pass = "",
                      .kernel = product,
                      .timed = {.prepare = prepare,
                                .run = scoped_run,
                                .wrong = std::bind_front(wrong, this),
                                .spoil = std::bind_front(&KernelDevice::Spoil, &device_, result)},
                      .result = result});
  }

  // Groups rows as the record does.
  absl::Status Group(int64_t record) {
    if (record == record_) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec_, record));
    offsets_.assign(rows.size() + 1, 0);
    std::partial_sum(rows.begin(), rows.end(), offsets_.begin() + 1);
    record_ = record;
    return absl::OkStatus();
  }

  absl::Status Forward() {
    return GroupedGemm<T>(Rows<const T>(x_, spec_.hidden), offsets_, weight_,
                          Rows<T>(y_, spec_.ffn), workspace_, device_.stream());
  }
  absl::Status InputGradient() {
    return GroupedGemmInputGradient<T>(Rows<const T>(dy_, spec_.ffn), offsets_, weight_,
                                       Rows<T>(dx_, spec_.hidden), workspace_, device_.stream());
  }
  absl::Status WeightGradient() {
    for (int e = 0; e < spec_.num_experts; ++e) {
      MOE_RETURN_IF_ERROR(GemmWeightGradient<T>(
          RowRange(Rows<const T>(dy_, spec_.ffn), offsets_[e], offsets_[e + 1]),
          RowRange(Rows<const T>(x_, spec_.hidden), offsets_[e], offsets_[e + 1]),
          WeightOf<float>(dw_, e), Write::kOverwrite, workspace_, device_.stream()));
    }
    return absl::OkStatus();
  }

  // Elements spread over each result that are not what the specification says.
  absl::StatusOr<int64_t> WrongForward() const {
    return CountWrong([&](int64_t n, int e, int64_t o, int64_t) {
      const GemmSum sum = Sum<T>(0, spec_.hidden, [&](int64_t k) {
        return std::pair(x()[n * spec_.hidden + k], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return IsWrong(y_, n * spec_.ffn + o, sum);
    });
  }
  absl::StatusOr<int64_t> WrongInputGradient() const {
    return CountWrong([&](int64_t n, int e, int64_t, int64_t k) {
      const GemmSum sum = Sum<T>(0, spec_.ffn, [&](int64_t o) {
        return std::pair(dy()[n * spec_.ffn + o], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return IsWrong(dx_, n * spec_.hidden + k, sum);
    });
  }
  absl::StatusOr<int64_t> WrongWeightGradient() const {
    return CountWrong([&](int64_t, int e, int64_t o, int64_t k) {
      const GemmSum sum = Sum<T>(offsets_[e], offsets_[e + 1], [&](int64_t i) {
        return std::pair(dy()[i * spec_.ffn + o], x()[i * spec_.hidden + k]);
      });
      return IsWrong(dw_, (e * spec_.ffn + o) * spec_.hidden + k, sum);
    });
  }
  template <typename U>
  absl::StatusOr<bool> IsWrong(const Mirrored<U>& result, int64_t i, const GemmSum& sum) const {
    MOE_RETURN_IF_ERROR(result.Download(i, i + 1));
    const bool fused = device_.is_cpu() || std::is_same_v<T, float>;
    return fused ? !(U(sum.chain) == result.host()[i]) : !WithinTensorCores(sum, result.host()[i]);
  }

  absl::Span<T> x() const { return x_.host(); }
  absl::Span<T> dy() const { return dy_.host(); }
  absl::Span<T> w() const { return w_.host(); }

  template <typename U>
  MatrixView<U> Rows(const Mirrored<T>& array, int64_t cols) const {
    return MatrixView<U>(array.device().data(), offsets_.back(), cols);
  }
  template <typename U>
  MatrixView<U> WeightOf(const Mirrored<std::remove_const_t<U>>& array, int e) const {
    return MatrixView<U>(array.device().data() + e * spec_.ffn * spec_.hidden, spec_.ffn,
                         spec_.hidden);
  }
  // wrong(row, its expert, column of F, column of H) at places spread by odd strides.
  template <typename Wrong>
  absl::StatusOr<int64_t> CountWrong(Wrong wrong) const {
    constexpr int64_t kSamples = 97;
    const int64_t rows = offsets_.back();
    int64_t count = 0;
    for (int64_t s = 0; s < kSamples && rows > 0; ++s) {
      const int64_t n = rows * s / kSamples;
      const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), n);
      MOE_ASSIGN_OR_RETURN(const bool is_wrong,
                           wrong(n, static_cast<int>(after - offsets_.begin()) - 1,
                                 spec_.ffn * (s * 31 % kSamples) / kSamples,
                                 spec_.hidden * (s * 57 % kSamples) / kSamples));
      count += is_wrong ? 1 : 0;
    }
    return count;
  }

  const GemmSpec spec_;
  KernelDevice& device_;
  Workspace workspace_;
  int64_t record_ = -1;
  std::vector<int64_t> offsets_;  // [E + 1] of record_
  Mirrored<T> x_, dy_, w_, y_, dx_;
  Mirrored<float> dw_;
  std::vector<MatrixView<const T>> weight_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGemmCases(const GemmSpec& spec,
                                                           KernelDevice& device) {
  return MakeCases<Products>("MakeGemmCases", spec, device);
}

}  // namespace moe::bench
