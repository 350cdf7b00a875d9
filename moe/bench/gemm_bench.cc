#include "moe/bench/gemm_bench.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/base/buffer.h"
#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/stream.h"
#include "kernels/base/tensor_view.h"
#include "kernels/base/workspace.h"
#include "kernels/grouped_gemm/fma_peak.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "moe/bench/timing.h"
#include "moe/bench/traffic.h"

namespace moe::bench {
namespace {

// About a millisecond of multiply-adds.
constexpr int64_t kPeakSteps = 100'000;

// GFLOP/s of all threads together.
double Peak(ThreadPool& pool) {
  std::vector<double> operations(pool.threads());
  const int64_t start = NowNs();
  pool.For(pool.threads(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) operations[i] = gemm::RunFma(kPeakSteps);
  });
  const auto ns = static_cast<double>(NowNs() - start);
  return std::accumulate(operations.begin(), operations.end(), 0.0) / ns;
}

// Operands and results of the three products.
template <typename T>
class Products {
 public:
  Products(const GemmSpec& spec, std::vector<int64_t> rows)
      : spec_(spec), offsets_(rows.size() + 1, 0) {
    std::partial_sum(rows.begin(), rows.end(), offsets_.begin() + 1);
  }

  absl::Status Fill() {
    const int64_t n = offsets_.back();
    const int64_t weights = spec_.num_experts * spec_.ffn * spec_.hidden;
    MOE_RETURN_IF_ERROR(Random(n * spec_.hidden, 0, x_));
    MOE_RETURN_IF_ERROR(Random(n * spec_.ffn, 1, dy_));
    MOE_RETURN_IF_ERROR(Random(weights, 2, w_));
    MOE_ASSIGN_OR_RETURN(y_, Buffer::Allocate(dy_.bytes()));
    MOE_ASSIGN_OR_RETURN(dx_, Buffer::Allocate(x_.bytes()));
    MOE_ASSIGN_OR_RETURN(dw_, Buffer::Allocate(weights * static_cast<int64_t>(sizeof(float))));
    for (int e = 0; e < spec_.num_experts; ++e) weight_.push_back(WeightOf<const T>(w_, e));
    return absl::OkStatus();
  }

  absl::Status Forward(Workspace& workspace, Stream& stream) {
    return GroupedGemm<T>(Rows<const T>(x_, spec_.hidden), offsets_, weight_,
                          Rows<T>(y_, spec_.ffn), workspace, stream);
  }
  absl::Status InputGradient(Workspace& workspace, Stream& stream) {
    return GroupedGemmInputGradient<T>(Rows<const T>(dy_, spec_.ffn), offsets_, weight_,
                                       Rows<T>(dx_, spec_.hidden), workspace, stream);
  }
  absl::Status WeightGradient(Workspace& workspace, Stream& stream) {
    for (int e = 0; e < spec_.num_experts; ++e) {
      MOE_RETURN_IF_ERROR(GemmWeightGradient<T>(
          RowRange(Rows<const T>(dy_, spec_.ffn), offsets_[e], offsets_[e + 1]),
          RowRange(Rows<const T>(x_, spec_.hidden), offsets_[e], offsets_[e + 1]),
          WeightOf<float>(dw_, e), Write::kOverwrite, workspace, stream));
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

 private:
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
  std::vector<int64_t> offsets_;  // [E + 1]
  Buffer x_, dy_, w_, y_, dx_, dw_;
  std::vector<MatrixView<const T>> weight_;
};

struct Product {
  const char* name;
  std::function<absl::Status()> run;
  std::function<int64_t()> wrong;
};

absl::Status Time(const Product& product, const GemmOptions& options, ThreadPool& pool,
                  GemmRow& row) {
  const double operations = 2.0 * static_cast<double>(row.rows) *
                            static_cast<double>(row.spec.hidden) *
                            static_cast<double>(row.spec.ffn);
  for (int i = 0; i < options.warmup; ++i) MOE_RETURN_IF_ERROR(product.run());
  std::vector<double> times, peaks, shares;
  const int64_t begin = NowNs();
  int64_t next_look = options.iterations;
  for (;;) {
    const double peak = Peak(pool);
    const int64_t start = NowNs();
    MOE_RETURN_IF_ERROR(product.run());
    const auto ns = static_cast<double>(NowNs() - start);
    times.push_back(ns * 1e-3);
    peaks.push_back(peak);
    shares.push_back(100 * operations / ns / peak);
    const auto calls = static_cast<int64_t>(times.size());
    if (calls < options.iterations) continue;
    if (absl::Nanoseconds(NowNs() - begin) >= options.budget) break;
    if (calls < next_look) continue;
    if (Describe(times).cv_pct <= options.max_noise_pct) break;
    next_look = 2 * calls;
  }
  row.time_us = Describe(times);
  row.iterations = static_cast<int64_t>(times.size());
  row.gflops_per_s = row.time_us.p50 > 0 ? operations / row.time_us.p50 * 1e-3 : 0;
  row.peak_gflops_per_s = Describe(peaks).p50;
  row.peak_pct = Describe(shares).p50;
  row.wrong = product.wrong();
  return absl::OkStatus();
}

template <typename T>
absl::StatusOr<std::vector<GemmRow>> MeasureAs(const GemmSpec& spec, const GemmOptions& options,
                                               ThreadPool& threads) {
  MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> expert_rows, ExpertRows(spec));
  Products<T> data(spec, expert_rows);
  MOE_RETURN_IF_ERROR(data.Fill());
  Workspace workspace;
  const auto stream = MakeInlineStream(&threads);
  const auto scoped = [&](auto call) {
    return [&workspace, &stream, &data, call] {
      const WorkspaceScope scratch(workspace);
      return (data.*call)(workspace, *stream);
    };
  };
  const Product products[] = {{"forward", scoped(&Products<T>::Forward),
                               [&] {
                                 return data.WrongForward();
                               }},
                              {"input_grad", scoped(&Products<T>::InputGradient),
                               [&] {
                                 return data.WrongInputGradient();
                               }},
                              {"weight_grad", scoped(&Products<T>::WeightGradient), [&] {
                                 return data.WrongWeightGradient();
                               }}};
  std::vector<GemmRow> rows;
  for (const Product& product : products) {
    GemmRow row{.product = product.name,
                .spec = spec,
                .threads = threads.threads(),
                .rows = spec.tokens * spec.top_k,
                .largest_rows = *std::max_element(expert_rows.begin(), expert_rows.end())};
    MOE_RETURN_IF_ERROR(Time(product, options, threads, row));
    rows.push_back(std::move(row));
  }
  return rows;
}

}  // namespace

absl::StatusOr<std::vector<int64_t>> ExpertRows(const GemmSpec& spec) {
  const auto kind = spec.routing.kind;
  if (kind != RoutingSpec::kUniform && kind != RoutingSpec::kZipf &&
      kind != RoutingSpec::kHotExpert) {
    return absl::InvalidArgumentError(
        absl::StrCat("ExpertRows: routing is ", spec.routing.text,
                     ", expected uniform, zipf:S or hot_expert:P, which are of experts"));
  }
  // One expert on each of E ranks, and what one rank sends.
  const Traffic traffic = MakeTraffic(spec.routing, {.ranks = spec.num_experts,
                                                     .count = spec.tokens * spec.top_k,
                                                     .num_experts = spec.num_experts,
                                                     .seed = spec.seed});
  const auto rows = traffic.from(0);
  return std::vector<int64_t>(rows.begin(), rows.end());
}

absl::StatusOr<std::vector<GemmRow>> MeasureGemm(const GemmSpec& spec, const GemmOptions& options,
                                                 ThreadPool& threads) {
  if (spec.dtype == DType::kFloat32) return MeasureAs<float>(spec, options, threads);
  if (spec.dtype == DType::kBFloat16) return MeasureAs<BFloat16>(spec, options, threads);
  return absl::InvalidArgumentError(
      absl::StrCat("MeasureGemm: type ", moe::NameOf(spec.dtype), ", expected f32 or bf16"));
}

const std::vector<std::string>& GemmKeys() {
  static const std::vector<std::string> keys = {"schema",       "op",
                                                "product",      "dtype",
                                                "tokens",       "topk",
                                                "experts",      "hidden",
                                                "ffn",          "routing",
                                                "seed",         "threads",
                                                "rows",         "largest_rows",
                                                "iters",        "time_us",
                                                "time_us_min",  "time_us_max",
                                                "time_us_p99",  "time_us_cv_pct",
                                                "gflops_per_s", "peak_gflops_per_s",
                                                "peak_pct",     "nwrong",
                                                "status",       "error"};
  return keys;
}

std::vector<Cell> GemmCells(const GemmRow& row) {
  const GemmSpec& s = row.spec;
  return {"moe.bench.gemm/1",
          "gemm",
          row.product,
          moe::NameOf(s.dtype),
          s.tokens,
          int64_t{s.top_k},
          int64_t{s.num_experts},
          s.hidden,
          s.ffn,
          s.routing.text,
          s.seed,
          int64_t{row.threads},
          row.rows,
          row.largest_rows,
          row.iterations,
          row.time_us.p50,
          row.time_us.min,
          row.time_us.max,
          row.time_us.p99,
          row.time_us.cv_pct,
          row.gflops_per_s,
          row.peak_gflops_per_s,
          row.peak_pct,
          row.wrong,
          row.wrong > 0 ? "wrong" : "ok",
          row.wrong > 0 ? Cell("wrong elements") : Cell()};
}

std::string GemmHead() {
  return "# product          rows  busiest   type       time     i_min     i_p99    i_cv%   "
         "GFLOP/s     %peak  #wrong\n"
         "#                                            (us)      (us)      (us)      (%)           "
         "                 \n";
}

std::string GemmLine(const GemmRow& row) {
  return absl::StrFormat("  %-12s %8d %8d %6s %10.1f %9.1f %9.1f %8.2f %9.1f %9.1f %7d\n",
                         row.product, row.rows, row.largest_rows, moe::NameOf(row.spec.dtype),
                         row.time_us.p50, row.time_us.min, row.time_us.p99, row.time_us.cv_pct,
                         row.gflops_per_s, row.peak_pct, row.wrong);
}

}  // namespace moe::bench
