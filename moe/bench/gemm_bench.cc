#include "moe/bench/gemm_bench.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/buffer.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/trace.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "moe/bench/slots.h"

namespace moe::bench {
namespace {

// About a millisecond of multiply-adds.
constexpr int64_t kPeakSteps = 100'000;

// GFLOP/s of all threads together.
double Peak(ThreadPool& pool) {
  std::vector<double> operations(pool.threads());
  const int64_t start = MonotonicNs();
  pool.For(pool.threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) operations[i] = gemm::RunFma(kPeakSteps);
  });
  const auto ns = static_cast<double>(MonotonicNs() - start);
  return std::accumulate(operations.begin(), operations.end(), 0.0) / ns;
}

// Operands and results of the three products.
template <typename T>
class Products final : public KernelCases {
 public:
  Products(const GemmSpec& spec, Stream& stream) : spec_(spec), stream_(stream) {}

  absl::Status Setup() {
    int64_t n = 0;  // of the largest call
    for (int64_t call = 0; call < CallsOf(spec_.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec_, call));
      n = std::max(n, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    }
    const int64_t weights = spec_.num_experts * spec_.ffn * spec_.hidden;
    MOE_RETURN_IF_ERROR(Random(n * spec_.hidden, 0, x_));
    MOE_RETURN_IF_ERROR(Random(n * spec_.ffn, 1, dy_));
    MOE_RETURN_IF_ERROR(Random(weights, 2, w_));
    MOE_ASSIGN_OR_RETURN(y_, Buffer::Allocate(dy_.bytes()));
    MOE_ASSIGN_OR_RETURN(dx_, Buffer::Allocate(x_.bytes()));
    MOE_ASSIGN_OR_RETURN(dw_, Buffer::Allocate(weights * static_cast<int64_t>(sizeof(float))));
    for (int e = 0; e < spec_.num_experts; ++e) weight_.push_back(WeightOf<const T>(w_, e));
    Add("forward", &Products::Forward, &Products::WrongForward, y_);
    Add("input_grad", &Products::InputGradient, &Products::WrongInputGradient, dx_);
    Add("weight_grad", &Products::WeightGradient, &Products::WrongWeightGradient, dw_);
    return absl::OkStatus();
  }

 private:
  void Add(const char* product, absl::Status (Products::*run)(), int64_t (Products::*wrong)() const,
           const Buffer& result) {
    const auto prepare = [this](int64_t call) {
      Group(call);
      return 2.0 * static_cast<double>(offsets_.back()) * static_cast<double>(spec_.hidden) *
             static_cast<double>(spec_.ffn);
    };
    const auto scoped_run = [this, run]() -> absl::Status {
      const WorkspaceScope scratch(workspace_);
      MOE_RETURN_IF_ERROR((this->*run)());
      return stream_.Synchronize();
    };
    const auto count = [this, wrong] {
      return (this->*wrong)();
    };
    const absl::Span<std::byte> bytes = result.span<std::byte>();
    cases_.push_back({.pass = "",
                      .kernel = product,
                      .timed = {.prepare = prepare,
                                .run = scoped_run,
                                .wrong = count,
                                .spoil =
                                    [bytes] {
                                      SpoilBytes(bytes);
                                    }},
                      .result = bytes});
  }

  // Groups rows as the routing of `call` does.
  void Group(int64_t call) {
    const int64_t record = call % CallsOf(spec_.routing);
    if (record != record_) {
      const std::vector<int64_t> rows = ExpertRows(spec_, record).value();
      offsets_.assign(rows.size() + 1, 0);
      std::partial_sum(rows.begin(), rows.end(), offsets_.begin() + 1);
      record_ = record;
    }
  }

  absl::Status Forward() {
    return GroupedGemm<T>(Rows<const T>(x_, spec_.hidden), offsets_, weight_,
                          Rows<T>(y_, spec_.ffn), workspace_, stream_);
  }
  absl::Status InputGradient() {
    return GroupedGemmInputGradient<T>(Rows<const T>(dy_, spec_.ffn), offsets_, weight_,
                                       Rows<T>(dx_, spec_.hidden), workspace_, stream_);
  }
  absl::Status WeightGradient() {
    for (int e = 0; e < spec_.num_experts; ++e) {
      MOE_RETURN_IF_ERROR(GemmWeightGradient<T>(
          RowRange(Rows<const T>(dy_, spec_.ffn), offsets_[e], offsets_[e + 1]),
          RowRange(Rows<const T>(x_, spec_.hidden), offsets_[e], offsets_[e + 1]),
          WeightOf<float>(dw_, e), Write::kOverwrite, workspace_, stream_));
    }
    return absl::OkStatus();
  }

  // Elements spread over each result that do not have the bits of the specification.
  int64_t WrongForward() const {
    return CountWrong([&](int64_t n, int e, int64_t o, int64_t) {
      const auto want = Chain(0, spec_.hidden, [&](int64_t k) {
        return std::pair(x()[n * spec_.hidden + k], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return !(T(want) == y_.span<T>()[n * spec_.ffn + o]);
    });
  }
  int64_t WrongInputGradient() const {
    return CountWrong([&](int64_t n, int e, int64_t, int64_t k) {
      const auto want = Chain(0, spec_.ffn, [&](int64_t o) {
        return std::pair(dy()[n * spec_.ffn + o], w()[(e * spec_.ffn + o) * spec_.hidden + k]);
      });
      return !(T(want) == dx_.span<T>()[n * spec_.hidden + k]);
    });
  }
  int64_t WrongWeightGradient() const {
    return CountWrong([&](int64_t, int e, int64_t o, int64_t k) {
      const auto want = Chain(offsets_[e], offsets_[e + 1], [&](int64_t i) {
        return std::pair(dy()[i * spec_.ffn + o], x()[i * spec_.hidden + k]);
      });
      return want != dw_.span<float>()[(e * spec_.ffn + o) * spec_.hidden + k];
    });
  }

  absl::Span<T> x() const { return x_.span<T>(); }
  absl::Span<T> dy() const { return dy_.span<T>(); }
  absl::Span<T> w() const { return w_.span<T>(); }

  absl::Status Random(int64_t elements, uint32_t which, Buffer& buffer) const {
    MOE_ASSIGN_OR_RETURN(buffer, Buffer::Allocate(elements * static_cast<int64_t>(sizeof(T))));
    for (int64_t i = 0; i < elements; i += 4) {
      const auto four = Random4({.seed = spec_.seed,
                                 .purpose = RandomPurpose::kData,
                                 .layer = which,
                                 .item = static_cast<uint64_t>(i)});
      for (int64_t j = i; j < std::min(i + 4, elements); ++j) {
        buffer.span<T>()[j] = T(static_cast<float>(four[j - i]) * 0x1p-31f - 1);
      }
    }
    return absl::OkStatus();
  }
  template <typename U>
  MatrixView<U> Rows(const Buffer& buffer, int64_t cols) const {
    return MatrixView<U>(buffer.span<std::remove_const_t<U>>().data(), offsets_.back(), cols);
  }
  template <typename U>
  MatrixView<U> WeightOf(const Buffer& buffer, int e) const {
    return MatrixView<U>(
        buffer.span<std::remove_const_t<U>>().data() + e * spec_.ffn * spec_.hidden, spec_.ffn,
        spec_.hidden);
  }
  // The reference: one fused multiply-add for each term, ascending.
  template <typename Pair>
  static float Chain(int64_t begin, int64_t end, Pair pair) {
    float sum = 0;
    for (int64_t i = begin; i < end; ++i) {
      const auto [a, b] = pair(i);
      sum = std::fma(static_cast<float>(a), static_cast<float>(b), sum);
    }
    return sum;
  }
  // wrong(row, its expert, column of F, column of H) at places spread by odd strides.
  template <typename Wrong>
  int64_t CountWrong(Wrong wrong) const {
    constexpr int64_t kSamples = 97;
    const int64_t rows = offsets_.back();
    int64_t count = 0;
    for (int64_t s = 0; s < kSamples && rows > 0; ++s) {
      const int64_t n = rows * s / kSamples;
      const auto after = std::upper_bound(offsets_.begin(), offsets_.end(), n);
      count += wrong(n, static_cast<int>(after - offsets_.begin()) - 1,
                     spec_.ffn * (s * 31 % kSamples) / kSamples,
                     spec_.hidden * (s * 57 % kSamples) / kSamples);
    }
    return count;
  }

  const GemmSpec spec_;
  Stream& stream_;
  Workspace workspace_;
  int64_t record_ = -1;
  std::vector<int64_t> offsets_;  // [E + 1] of record_
  Buffer x_, dy_, w_, y_, dx_, dw_;
  std::vector<MatrixView<const T>> weight_;
};

template <typename T>
absl::StatusOr<std::unique_ptr<KernelCases>> Make(const GemmSpec& spec, Stream& stream) {
  auto products = std::make_unique<Products<T>>(spec, stream);
  MOE_RETURN_IF_ERROR(products->Setup());
  return std::unique_ptr<KernelCases>(std::move(products));
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

absl::StatusOr<std::unique_ptr<KernelCases>> MakeGemmCases(const GemmSpec& spec, Stream& stream) {
  if (spec.dtype == DType::kFloat32) return Make<float>(spec, stream);
  if (spec.dtype == DType::kBFloat16) return Make<BFloat16>(spec, stream);
  return absl::InvalidArgumentError(
      absl::StrCat("MakeGemmCases: type ", moe::NameOf(spec.dtype), ", expected f32 or bf16"));
}

absl::StatusOr<std::vector<GemmRow>> MeasureGemm(const GemmSpec& spec,
                                                 const MeasureOptions& options,
                                                 ThreadPool& threads) {
  const auto stream = MakeInlineStream(&threads);
  MOE_ASSIGN_OR_RETURN(const auto products, MakeGemmCases(spec, *stream));
  int64_t most_rows = 0;
  int64_t largest_rows = 0;
  for (int64_t call = 0; call < CallsOf(spec.routing); ++call) {
    MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec, call));
    most_rows = std::max(most_rows, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    largest_rows = std::max(largest_rows, *std::max_element(rows.begin(), rows.end()));
  }
  std::vector<GemmRow> rows;
  for (const KernelCase& product : products->cases()) {
    MOE_ASSIGN_OR_RETURN(const KernelTimes times,
                         TimeKernel(
                             product.timed, [&](double) { return Peak(threads); }, options));
    rows.push_back({.product = product.kernel,
                    .spec = spec,
                    .threads = threads.threads(),
                    .rows = most_rows,
                    .largest_rows = largest_rows,
                    .times = times});
  }
  return rows;
}

Fields GemmFields(const GemmRow& row) {
  const GemmSpec& s = row.spec;
  Fields fields = {{"schema", "moe.bench.gemm/1"},
                   {"op", "gemm"},
                   {"product", row.product},
                   {"dtype", moe::NameOf(s.dtype)},
                   {"tokens", s.tokens},
                   {"topk", int64_t{s.top_k}},
                   {"experts", int64_t{s.num_experts}},
                   {"hidden", s.hidden},
                   {"ffn", s.ffn},
                   {"routing", s.routing.text},
                   {"seed", s.seed},
                   {"threads", int64_t{row.threads}},
                   {"rows", row.rows},
                   {"largest_rows", row.largest_rows}};
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
