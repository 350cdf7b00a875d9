// The grouped products of experts: forward, both gradients, and packed weights on a CPU.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <type_traits>
#include <utility>
#include <vector>

#include <benchmark/benchmark.h>

#include "benchmarks/kernel_group.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/packed_weights.h"
#include "kernels/grouped_gemm/weight_gradient.h"

namespace moe::measure {
namespace {

// About a millisecond of multiply-adds.
constexpr int64_t kPeakSteps = 100'000;

// One dense product by cuBLAS, n x n x n: the reference for a grouped product on a GPU.
template <typename T>
class DenseProduct {
 public:
  // nullptr if cuBLAS is missing. `operations`: those of the grouped product. The dense one has the
  // same number, rounded down to whole tiles, up to a size beyond which it would not run faster.
  static absl::StatusOr<std::unique_ptr<DenseProduct>> Create(double operations,
                                                              KernelDevice& device) {
    constexpr int64_t kTile = 8, kMost = 8192;
    MOE_ASSIGN_OR_RETURN(
        auto cublas,
        MakeCublas(GroupedGemmKernel::kAuto, RowBits::kMayDependOnCount, device.stream().device()));
    if (cublas == nullptr) return nullptr;
    const auto side = static_cast<int64_t>(std::cbrt(operations / 2));
    const int64_t n = std::clamp(side / kTile * kTile, kTile, kMost);
    std::unique_ptr<DenseProduct> made(new DenseProduct(n, device, std::move(cublas)));
    MOE_ASSIGN_OR_RETURN(made->a_, UniformValues<T>(n * n, 0, 0, device, "dense product"));
    MOE_ASSIGN_OR_RETURN(made->b_, UniformValues<T>(n * n, 0, 1, device, "dense product"));
    MOE_ASSIGN_OR_RETURN(made->c_, Array<T>::Allocate(n * n, device, "dense product"));
    MOE_RETURN_IF_ERROR(made->Run());  // lets the library choose and load its kernel
    return made;
  }

  // GFLOP/s.
  absl::StatusOr<double> Measure() {
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time([&] { return Run(); }));
    const auto n = static_cast<double>(n_);
    return 2 * n * n * n / ns;
  }

 private:
  DenseProduct(int64_t n, KernelDevice& device, std::unique_ptr<Cublas> cublas)
      : n_(n), device_(device), cublas_(std::move(cublas)), workspace_(device.memory()) {}

  absl::Status Run() {
    return Gemm<T>(MatrixView<const T>(a_.data(), n_, n_), MatrixView<const T>(b_.data(), n_, n_),
                   MatrixView<T>(c_.data(), n_, n_), workspace_, device_.stream(),
                   {.kernel = GroupedGemmKernel::kCublas, .cublas = cublas_.get()});
  }

  const int64_t n_;
  KernelDevice& device_;
  const std::unique_ptr<Cublas> cublas_;
  Workspace workspace_;
  Array<T> a_, b_, c_;
};

template <typename T>
class GemmKernels final : public KernelGroup {
 public:
  GemmKernels(const KernelShape& shape, KernelDevice& device)
      : shape_(shape), device_(device), workspace_(device.memory()) {}

  absl::Status SetUp() {
    const std::vector<int64_t> rows =
        CountSlots(DrawSlots(shape_.routing, shape_.slots()), shape_.router.num_experts);
    offsets_.assign(rows.size() + 1, 0);
    std::partial_sum(rows.begin(), rows.end(), offsets_.begin() + 1);
    const int64_t N = offsets_.back(), H = shape_.hidden, F = shape_.ffn;
    const int64_t E = shape_.router.num_experts;
    MOE_ASSIGN_OR_RETURN(x_, UniformValues<T>(N * H, shape_.seed, 0, device_, "x"));
    MOE_ASSIGN_OR_RETURN(dy_, UniformValues<T>(N * F, shape_.seed, 1, device_, "dy"));
    MOE_ASSIGN_OR_RETURN(w_, UniformValues<T>(E * F * H, shape_.seed, 2, device_, "weights"));
    MOE_ASSIGN_OR_RETURN(y_, Array<T>::Allocate(N * F, device_, "y"));
    MOE_ASSIGN_OR_RETURN(dx_, Array<T>::Allocate(N * H, device_, "dx"));
    MOE_ASSIGN_OR_RETURN(dw_, Array<float>::Allocate(E * F * H, device_, "weight gradients"));
    MOE_ASSIGN_OR_RETURN(exact_dw_,
                         Array<int64_t>::Allocate(E * F * H, device_, "exact gradients"));
    MOE_ASSIGN_OR_RETURN(tally_, Array<GridTally>::Allocate(1, device_, "tally"));
    empty_ = std::make_unique<bool[]>(E);
    for (int64_t e = 0; e < E; ++e) {
      weight_.emplace_back(w_.data() + e * F * H, F, H);
      grads_.emplace_back(dw_.span().subspan(e * F * H, F * H), &empty_[e]);
      exact_grads_.emplace_back(exact_dw_.span().subspan(e * F * H, F * H), ExactGrid(),
                                tally_.data(), &empty_[e]);
      if (!device_.is_cpu()) continue;
      MOE_RETURN_IF_ERROR(AddPacked(InTree(), packed_));
      if (shape_.leaves > 1) MOE_RETURN_IF_ERROR(AddPacked({}, packed_for_chain_));
    }
    operations_ = 2.0 * static_cast<double>(N) * static_cast<double>(H) * static_cast<double>(F);
    if (!device_.is_cpu()) {
      MOE_ASSIGN_OR_RETURN(dense_, DenseProduct<T>::Create(operations_, device_));
    }
    return AddKernels();
  }

 private:
  absl::Status AddKernels() {
    if (device_.is_cpu()) {
      kernels_.push_back(
          {"pack", std::bind_front(&GemmKernels::Pack, this), {ReadLimit(2 * sizeof(T))}});
      AddProduct("packed_forward", &GemmKernels::PackedForward, sizeof(T));
    }
    AddProduct("forward", &GemmKernels::Forward, sizeof(T));
    AddProduct("input_grad", &GemmKernels::InputGradient, sizeof(T));
    AddProduct("weight_grad", &GemmKernels::WeightGradient, sizeof(float));
    AddProduct("weight_grad_exact", &GemmKernels::ExactWeightGradient, sizeof(int64_t));
    return absl::OkStatus();
  }
  // `weight_bytes`: size of an element of the weights, or of their gradient.
  void AddProduct(const char* name, absl::Status (GemmKernels::*run)(), size_t weight_bytes) {
    Kernel kernel = {name, std::bind_front(run, this), {}};
    kernel.limits.push_back({.name = "peak",
                             .unit = "gflops_per_s",
                             .work = operations_,
                             .measure = std::bind_front(&GemmKernels::Peak, this)});
    if (device_.is_cpu()) kernel.limits.push_back(ReadLimit(weight_bytes));
    if (shape_.leaves > 1) {
      const auto chain = [this, run]() -> absl::StatusOr<double> {
        leaves_ = 1;
        const auto ns = device_.Time(std::bind_front(run, this));
        leaves_ = shape_.leaves;
        MOE_RETURN_IF_ERROR(ns.status());
        return operations_ / *ns;
      };
      kernel.limits.push_back({"chain", "gflops_per_s", operations_, chain});
    }
    kernels_.push_back(std::move(kernel));
  }

  // On a CPU the rate of multiply-adds, or for bfloat16 of dot products or tiles, of all threads in
  // registers; on a GPU that of a dense product by cuBLAS, or 0 if it is missing.
  absl::StatusOr<double> Peak() {
    if (!device_.is_cpu()) return dense_ == nullptr ? 0 : dense_->Measure();
    const auto run = [order = shape_.order](int64_t steps) {
      return std::is_same_v<T, BFloat16> ? gemm::RunBFloat16Peak(order, steps)
                                         : gemm::RunFma(steps);
    };
    ThreadPool& pool = device_.threads();
    std::vector<double> operations(pool.threads());
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time([&] {
      pool.For(pool.threads(), 1, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) operations[i] = run(kPeakSteps);
      });
      return absl::OkStatus();
    }));
    return std::accumulate(operations.begin(), operations.end(), 0.0) / ns;
  }

  // The limit for few rows: all threads read as many bytes as the weights have, front to back.
  KernelLimit ReadLimit(size_t weight_bytes) {
    return {.name = "read",
            .unit = "gbytes_per_s",
            .work = static_cast<double>(w_.span().size() * weight_bytes),
            .measure = std::bind_front(&GemmKernels::ReadSpeed, this)};
  }
  absl::StatusOr<double> ReadSpeed() {
    const auto* const data = reinterpret_cast<const float*>(w_.data());
    const auto floats = static_cast<int64_t>(w_.span().size() * sizeof(T) / sizeof(float));
    ThreadPool& pool = device_.threads();
    const int64_t part = (floats + pool.threads() - 1) / pool.threads();
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time([&] {
      pool.For(floats, part, [&](int64_t begin, int64_t end) {
        benchmark::DoNotOptimize(gemm::ReadFloats(data + begin, end - begin));
      });
      return absl::OkStatus();
    }));
    return static_cast<double>(floats) * sizeof(float) / ns;
  }

  // Tiles are packed for one tree.
  absl::Status AddPacked(const GemmTree& tree, std::vector<PackedWeights<T>>& packed) {
    MOE_ASSIGN_OR_RETURN(packed.emplace_back(),
                         PackedWeights<T>::Create(shape_.ffn, shape_.hidden, shape_.order, tree));
    return packed.back().Pack(weight_[packed.size() - 1], 0, device_.stream());
  }
  absl::Status Pack() {
    for (size_t e = 0; e < packed_.size(); ++e) {
      MOE_RETURN_IF_ERROR(packed_[e].Pack(weight_[e], 0, device_.stream()));
    }
    return absl::OkStatus();
  }
  absl::Status PackedForward() {
    const auto& packed = leaves_ == shape_.leaves ? packed_ : packed_for_chain_;
    return GroupedGemm<T>(Rows<const T>(x_, shape_.hidden), offsets_, packed, 0,
                          Rows<T>(y_, shape_.ffn), workspace_, device_.stream(), InTree());
  }
  absl::Status Forward() {
    const WorkspaceScope scratch(workspace_);
    return GroupedGemm<T>(Rows<const T>(x_, shape_.hidden), offsets_, weight_,
                          Rows<T>(y_, shape_.ffn), workspace_, device_.stream(), Options(),
                          InTree());
  }
  absl::Status InputGradient() {
    const WorkspaceScope scratch(workspace_);
    return GroupedGemmInputGradient<T>(Rows<const T>(dy_, shape_.ffn), offsets_, weight_,
                                       Rows<T>(dx_, shape_.hidden), workspace_, device_.stream(),
                                       Options(), OutTree());
  }
  absl::Status WeightGradient() { return WeightGradients(grads_); }
  absl::Status ExactWeightGradient() { return WeightGradients(exact_grads_); }
  absl::Status WeightGradients(absl::Span<const GradAccumulator> grads) {
    const WorkspaceScope scratch(workspace_);
    std::fill_n(empty_.get(), grads.size(), true);
    return AddWeightGradients<T>(Rows<const T>(dy_, shape_.ffn), Rows<const T>(x_, shape_.hidden),
                                 offsets_, grads, workspace_, device_.stream(), Options());
  }

  template <typename U>
  MatrixView<U> Rows(const Array<T>& array, int64_t cols) const {
    return MatrixView<U>(array.data(), offsets_.back(), cols);
  }
  GemmOptions Options() const { return {.bfloat16_order = shape_.order}; }
  // Trees of a down projection, and of a fused gate and up projection.
  GemmTree InTree() const { return {{leaves_, shape_.hidden, 16}}; }
  GemmTree OutTree() const { return {{leaves_, shape_.ffn / 2, 16}, 2}; }

  const KernelShape shape_;
  KernelDevice& device_;
  Workspace workspace_;
  int leaves_ = shape_.leaves;
  double operations_ = 0;
  std::vector<int64_t> offsets_;  // [E + 1]
  Array<T> x_, dy_, w_, y_, dx_;
  Array<float> dw_;
  Array<int64_t> exact_dw_;
  Array<GridTally> tally_;
  std::vector<MatrixView<const T>> weight_;
  std::vector<PackedWeights<T>> packed_, packed_for_chain_;  // on a CPU
  std::unique_ptr<bool[]> empty_;  // whose gradients overwrite the old values
  std::vector<GradAccumulator> grads_, exact_grads_;
  std::unique_ptr<DenseProduct<T>> dense_;  // on a GPU that has cuBLAS
};

}  // namespace

MadeKernels MakeGemmKernels(const KernelShape& shape, KernelDevice& device) {
  return WithStorageType(shape.dtype, [&]<typename T>(T) -> MadeKernels {
    auto kernels = std::make_unique<GemmKernels<T>>(shape, device);
    MOE_RETURN_IF_ERROR(kernels->SetUp());
    return kernels;
  });
}

}  // namespace moe::measure
