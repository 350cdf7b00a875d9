// The three products of an expert layer, with their data, checks and limits.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/trace.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "moe/cli/bench/kernel_bench.h"
#include "moe/cli/bench/kernel_device.h"
#include "moe/cli/bench/routing_spec.h"
#include "moe/cli/bench/tables.h"

namespace moe::bench {
namespace {

// An element's sum of products.
struct GemmSum {
  float chains = 0;  // the reference: fused multiply-adds, 128 words a chain (grouped_gemm.h)
  double exact = 0;
  double magnitudes = 0;  // sum of |a b|
  int64_t depth = 0;
};
template <typename T, typename Pair>
GemmSum Sum(int64_t begin, int64_t end, Pair pair) {
  constexpr int64_t kTerms = std::is_same_v<T, BFloat16> ? 256 : 128;
  GemmSum sum{.depth = end - begin};
  float chain = 0;
  const auto add = [&](int64_t i) {
    const auto [a, b] = pair(i);
    const auto x = static_cast<float>(a);
    const auto y = static_cast<float>(b);
    chain = std::fma(x, y, chain);
    const double product = static_cast<double>(x) * static_cast<double>(y);
    sum.exact += product;
    sum.magnitudes += std::abs(product);
  };
  for (int64_t from = begin; from < end; from += kTerms) {
    const int64_t to = std::min(end, from + kTerms);
    if constexpr (std::is_same_v<T, BFloat16>) {  // the second of two terms goes first
      for (int64_t i = from; i < to; i += 2) {
        if (i + 1 < to) add(i + 1);
        add(i);
      }
    } else {
      for (int64_t i = from; i < to; ++i) add(i);
    }
    sum.chains = from == begin ? chain : sum.chains + chain;
    chain = 0;
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
  Products(const KernelSpec& spec, KernelDevice& device)
      : spec_(spec), device_(device), workspace_(device.memory()) {}

  absl::Status Setup() {
    int64_t n = 0;  // of the largest call
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec_, call));
      n = std::max(n, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    }
    const int64_t weights = spec_.router.num_experts * spec_.ffn * spec_.hidden;
    MOE_ASSIGN_OR_RETURN(x_, UniformValues<T>(n * spec_.hidden, spec_.seed, 0, device_, "x"));
    MOE_ASSIGN_OR_RETURN(dy_, UniformValues<T>(n * spec_.ffn, spec_.seed, 1, device_, "dy"));
    MOE_ASSIGN_OR_RETURN(w_, UniformValues<T>(weights, spec_.seed, 2, device_, "weights"));
    MOE_ASSIGN_OR_RETURN(y_, Mirrored<T>::Allocate(n * spec_.ffn, device_, "y"));
    MOE_ASSIGN_OR_RETURN(dx_, Mirrored<T>::Allocate(n * spec_.hidden, device_, "dx"));
    MOE_ASSIGN_OR_RETURN(dw_, Mirrored<float>::Allocate(weights, device_, "weight gradients"));
    const int64_t size = spec_.ffn * spec_.hidden;
    empty_ = std::make_unique<bool[]>(spec_.router.num_experts);
    for (int e = 0; e < spec_.router.num_experts; ++e) {
      weight_.emplace_back(w_.device().data() + e * size, spec_.ffn, spec_.hidden);
      grads_.emplace_back(dw_.device().subspan(e * size, size), &empty_[e]);
    }
    Add(this, device_, "", "forward", &Products::Operations, &Products::Forward,
        &Products::WrongForward, y_.bytes());
    Add(this, device_, "", "input_grad", &Products::Operations, &Products::InputGradient,
        &Products::WrongInputGradient, dx_.bytes());
    Add(this, device_, "", "weight_grad", &Products::Operations, &Products::WeightGradient,
        &Products::WrongWeightGradient, dw_.bytes());
    return absl::OkStatus();
  }

 private:
  friend class KernelCases;

  double Operations() const {
    return 2.0 * static_cast<double>(offsets_.back()) * static_cast<double>(spec_.hidden) *
           static_cast<double>(spec_.ffn);
  }

  // Groups rows as the record does.
  absl::Status Turn(int64_t record) {
    if (record == record_) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec_, record));
    offsets_.assign(rows.size() + 1, 0);
    std::partial_sum(rows.begin(), rows.end(), offsets_.begin() + 1);
    record_ = record;
    return absl::OkStatus();
  }

  absl::Status Forward() {
    const WorkspaceScope scratch(workspace_);
    return GroupedGemm<T>(Rows<const T>(x_, spec_.hidden), offsets_, weight_,
                          Rows<T>(y_, spec_.ffn), workspace_, device_.stream());
  }
  absl::Status InputGradient() {
    const WorkspaceScope scratch(workspace_);
    return GroupedGemmInputGradient<T>(Rows<const T>(dy_, spec_.ffn), offsets_, weight_,
                                       Rows<T>(dx_, spec_.hidden), workspace_, device_.stream());
  }
  absl::Status WeightGradient() {
    const WorkspaceScope scratch(workspace_);
    std::fill_n(empty_.get(), grads_.size(), true);
    return AddWeightGradients<T>(Rows<const T>(dy_, spec_.ffn), Rows<const T>(x_, spec_.hidden),
                                 offsets_, grads_, workspace_, device_.stream());
  }

  // Elements spread over each result that are not what the specification says.
  absl::StatusOr<int64_t> WrongForward() {
    return CountWrong([&](int64_t n, int e, int64_t o, int64_t) {
      const GemmSum sum = Sum<T>(0, spec_.hidden, [&](int64_t k) {
        return std::pair(x()[n * spec_.hidden + k], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return IsWrong(y_, n * spec_.ffn + o, sum);
    });
  }
  absl::StatusOr<int64_t> WrongInputGradient() {
    return CountWrong([&](int64_t n, int e, int64_t, int64_t k) {
      const GemmSum sum = Sum<T>(0, spec_.ffn, [&](int64_t o) {
        return std::pair(dy()[n * spec_.ffn + o], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return IsWrong(dx_, n * spec_.hidden + k, sum);
    });
  }
  absl::StatusOr<int64_t> WrongWeightGradient() {
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
    return fused ? !(U(sum.chains) == result.host()[i]) : !WithinTensorCores(sum, result.host()[i]);
  }

  absl::Span<T> x() const { return x_.host(); }
  absl::Span<T> dy() const { return dy_.host(); }
  absl::Span<T> w() const { return w_.host(); }

  template <typename U>
  MatrixView<U> Rows(const Mirrored<T>& array, int64_t cols) const {
    return MatrixView<U>(array.device().data(), offsets_.back(), cols);
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

  const KernelSpec spec_;
  KernelDevice& device_;
  Workspace workspace_;
  int64_t record_ = -1;
  std::vector<int64_t> offsets_;  // [E + 1] of record_
  Mirrored<T> x_, dy_, w_, y_, dx_;
  Mirrored<float> dw_;
  std::vector<MatrixView<const T>> weight_;
  std::unique_ptr<bool[]> empty_;  // whose gradients overwrite what is there
  std::vector<GradAccumulator> grads_;
};

// About a millisecond of multiply-adds.
constexpr int64_t kPeakSteps = 100'000;

// GFLOP/s of all threads together, for products of `dtype`.
double Peak(ThreadPool& pool, DType dtype) {
  const auto run = dtype == DType::kBFloat16 ? gemm::RunBFloat16Peak : gemm::RunFma;
  std::vector<double> operations(pool.threads());
  const int64_t start = MonotonicNs();
  pool.For(pool.threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) operations[i] = run(kPeakSteps);
  });
  const auto ns = static_cast<double>(MonotonicNs() - start);
  return std::accumulate(operations.begin(), operations.end(), 0.0) / ns;
}

// One dense product by cuBLAS, n x n x n.
template <typename T>
class DenseProduct {
 public:
  static absl::StatusOr<std::shared_ptr<DenseProduct>> Create(int64_t n, KernelDevice& device,
                                                              std::unique_ptr<Cublas> cublas) {
    auto made = std::make_shared<DenseProduct>(n, device, std::move(cublas));
    MOE_ASSIGN_OR_RETURN(made->a_, UniformValues<T>(n * n, 0, 0, device, "dense product"));
    MOE_ASSIGN_OR_RETURN(made->b_, UniformValues<T>(n * n, 0, 1, device, "dense product"));
    MOE_ASSIGN_OR_RETURN(made->c_, Mirrored<T>::Allocate(n * n, device, "dense product"));
    MOE_RETURN_IF_ERROR(made->Run());  // the library chooses and loads its kernel
    return made;
  }
  DenseProduct(int64_t n, KernelDevice& device, std::unique_ptr<Cublas> cublas)
      : n_(n), device_(device), cublas_(std::move(cublas)), workspace_(device.memory()) {}

  // GFLOP/s.
  absl::StatusOr<double> Measure() {
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time([&] { return Run(); }));
    const auto n = static_cast<double>(n_);
    return 2 * n * n * n / ns;
  }

 private:
  absl::Status Run() {
    return Gemm<T>(MatrixView<const T>(a_.device().data(), n_, n_),
                   MatrixView<const T>(b_.device().data(), n_, n_),
                   MatrixView<T>(c_.device().data(), n_, n_), workspace_, device_.stream(),
                   {.kernel = GroupedGemmKernel::kCublas, .cublas = cublas_.get()});
  }

  const int64_t n_;
  KernelDevice& device_;
  const std::unique_ptr<Cublas> cublas_;
  Workspace workspace_;
  Mirrored<T> a_, b_, c_;
};

// Of as many operations as the grouped product, rounded down to whole tiles, and at most so many
// that more would not run faster.
int64_t DenseSide(double operations) {
  constexpr int64_t kTile = 8, kMost = 8192;
  const auto side = static_cast<int64_t>(std::cbrt(operations / 2));
  return std::clamp(side / kTile * kTile, kTile, kMost);
}

template <typename T>
absl::StatusOr<KernelLimit> DenseLimit(double operations, KernelDevice& device) {
  MOE_ASSIGN_OR_RETURN(auto cublas, MakeCublas(GroupedGemmKernel::kAuto, RowBits::kMayDependOnCount,
                                               device.stream().device()));
  if (cublas == nullptr) return KernelLimit();
  MOE_ASSIGN_OR_RETURN(const auto dense,
                       DenseProduct<T>::Create(DenseSide(operations), device, std::move(cublas)));
  return [dense](double) {
    return dense->Measure();
  };
}

}  // namespace

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGemmCases(const KernelSpec& spec,
                                                           KernelDevice& device) {
  return MakeCases<Products>("MakeGemmCases", spec, device);
}

// On the CPU multiply-adds or dot products in registers, on a GPU a dense product of cuBLAS, if it
// is there.
absl::StatusOr<KernelLimit> GemmLimit(const KernelSpec& spec, int64_t rows, KernelDevice& device) {
  if (device.is_cpu()) {
    return [&pool = device.threads(), dtype = spec.dtype](double) {
      return Peak(pool, dtype);
    };
  }
  const double operations = 2.0 * static_cast<double>(rows) * static_cast<double>(spec.hidden) *
                            static_cast<double>(spec.ffn);
  return WithStorageType(spec.dtype,
                         [&]<typename T>(T) { return DenseLimit<T>(operations, device); });
}

}  // namespace moe::bench
