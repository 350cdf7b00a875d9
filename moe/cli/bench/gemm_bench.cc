#include "moe/cli/bench/gemm_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/trace.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "moe/cli/bench/kernel_device.h"
#include "moe/cli/bench/slots.h"

namespace moe::bench {
namespace {

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

// What bounds the products: on the CPU multiply-adds or dot products in registers, on a GPU a dense
// product of cuBLAS, if it is there.
absl::StatusOr<KernelLimit> LimitOf(const GemmSpec& spec, int64_t rows, KernelDevice& device) {
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

}  // namespace

absl::StatusOr<std::vector<int64_t>> ExpertRows(const GemmSpec& spec, int64_t call) {
  const auto kind = spec.routing.kind;
  if (kind == RoutingSpec::kTrace && spec.routing.replay->ranks() == 1 &&
      spec.routing.replay->header().num_experts == spec.num_experts) {
    const auto rows = spec.routing.replay->slots_of(call, 0);
    return std::vector<int64_t>(rows.begin(), rows.end());
  }
  if (kind != RoutingSpec::kUniform && kind != RoutingSpec::kZipf &&
      kind != RoutingSpec::kHotExpert) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ExpertRows: routing is ", spec.routing.text,
        ", expected uniform, zipf:S, hot_expert:P or a trace of one rank, which are of experts"));
  }
  if (spec.top_k < 1 || spec.top_k > spec.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "ExpertRows: top_k is ", spec.top_k, ", expected 1 to the ", spec.num_experts, " experts"));
  }
  return CountSlots(DrawSlots(spec.routing, {.tokens = spec.tokens,
                                             .top_k = spec.top_k,
                                             .num_experts = spec.num_experts,
                                             .seed = spec.seed}),
                    spec.num_experts);
}

absl::StatusOr<std::vector<GemmRow>> MeasureGemm(const GemmSpec& spec,
                                                 const MeasureOptions& options,
                                                 KernelDevice& device) {
  MOE_ASSIGN_OR_RETURN(const auto products, MakeGemmCases(spec, device));
  int64_t most_rows = 0;
  int64_t largest_rows = 0;
  for (int64_t call = 0; call < CallsOf(spec.routing); ++call) {
    MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec, call));
    most_rows = std::max(most_rows, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    largest_rows = std::max(largest_rows, *std::max_element(rows.begin(), rows.end()));
  }
  MOE_ASSIGN_OR_RETURN(const KernelLimit limit, LimitOf(spec, most_rows, device));
  std::vector<GemmRow> rows;
  for (const KernelCase& product : products->cases()) {
    MOE_ASSIGN_OR_RETURN(const KernelTimes times,
                         TimeKernel(product.timed, limit, options, device));
    rows.push_back({.product = product.kernel,
                    .spec = spec,
                    .place = device.place(),
                    .rows = most_rows,
                    .largest_rows = largest_rows,
                    .times = times});
  }
  return rows;
}

Fields GemmFields(const GemmRow& row) {
  const GemmSpec& s = row.spec;
  Fields fields = {
      {"schema", "moe.bench.gemm/1"},      {"op", "gemm"},       {"product", row.product},
      {"dtype", moe::NameOf(s.dtype)},     {"tokens", s.tokens}, {"topk", int64_t{s.top_k}},
      {"experts", int64_t{s.num_experts}}, {"hidden", s.hidden}, {"ffn", s.ffn},
      {"routing", s.routing.text},         {"seed", s.seed}};
  AddPlace(row.place, fields);
  fields.insert(fields.end(), {{"rows", row.rows}, {"largest_rows", row.largest_rows}});
  AddTimes(row.times.time_us, row.times.iterations, fields);
  fields.insert(fields.end(), {{"gflops_per_s", row.times.work_per_ns},
                               {"peak_gflops_per_s", row.times.limit_per_ns},
                               {"peak_pct", row.times.limit_pct}});
  AddVerdict(row.times.wrong, "wrong elements", fields);
  return fields;
}

absl::Span<const Column> GemmColumns() {
  static constexpr Column kColumns[] = {{"product", "product", "", -12},
                                        {"rows", "rows", "", 8},
                                        {"largest_rows", "busiest", "", 8},
                                        {"dtype", "type", "", 6},
                                        {"time_us", "time", "(us)", 10, 1},
                                        {"time_us_min", "i_min", "(us)", 9, 1},
                                        {"time_us_p99", "i_p99", "(us)", 9, 1},
                                        {"time_us_cv_pct", "i_cv%", "(%)", 8, 2},
                                        {"gflops_per_s", "GFLOP/s", "", 9, 1},
                                        {"peak_pct", "%peak", "(%)", 9, 1},
                                        {"nwrong", "#wrong", "", 7}};
  return kColumns;
}

}  // namespace moe::bench
