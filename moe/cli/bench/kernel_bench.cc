#include "moe/cli/bench/kernel_bench.h"

#include <algorithm>
#include <numeric>

#include <absl/strings/str_cat.h>

#include "comm/copy.h"
#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace moe::bench {
namespace {

// The most that the memory gives: a copy, which reads half of the bytes and writes half. On the CPU
// by all threads, in turn through the caches and past them: kernels that read more than they write
// may be faster than the former.
class CopyLimit {
 public:
  explicit CopyLimit(KernelDevice& device) : device_(device) {}

  absl::Status Reserve(int64_t bytes) {
    const int64_t half = (bytes + 1) / 2;
    if (from_.bytes() >= half) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(from_, Buffer::Allocate(half, device_.memory(), "the copy's source"));
    MOE_ASSIGN_OR_RETURN(to_, Buffer::Allocate(half, device_.memory(), "the copy"));
    return device_.Spoil(from_.span<std::byte>());  // zeros might be cheaper to move
  }
  // Bytes read and written per ns.
  absl::StatusOr<double> Measure(double work) {
    const int64_t bytes = std::min(from_.bytes(), static_cast<int64_t>(work / 2));
    MOE_ASSIGN_OR_RETURN(const double ns, device_.Time([&] { return Copy(bytes); }));
    return ns > 0 ? 2 * static_cast<double>(bytes) / ns : 0;
  }

 private:
  absl::Status Copy(int64_t bytes) {
    if (!device_.is_cpu()) return device_.stream().CopyBytes(from_.data(), to_.data(), bytes);
    ThreadPool& pool = device_.threads();
    hint_ = hint_ == CopyHint::kCached ? CopyHint::kStreamed : CopyHint::kCached;
    const int64_t grain = std::max<int64_t>(1, (bytes + pool.threads() - 1) / pool.threads());
    pool.For(bytes, grain, [&](int64_t begin, int64_t end) {
      CopyBytes(to_.data() + begin, from_.data() + begin, end - begin, hint_);
    });
    return absl::OkStatus();
  }

  KernelDevice& device_;
  Buffer from_, to_;
  CopyHint hint_ = CopyHint::kStreamed;
};

}  // namespace

const char* NameOf(KernelOp op) {
  constexpr const char* kNames[] = {"gate", "permute", "combine", "gemm"};
  return kNames[static_cast<int>(op)];
}

absl::StatusOr<TokenSlots> KernelSlots(const KernelSpec& spec, int64_t call) {
  const auto kind = spec.routing.kind;
  if (kind == RoutingSpec::kTrace && spec.routing.replay->ranks() == 1 &&
      spec.routing.replay->header().num_experts == spec.router.num_experts) {
    return DealSlots(spec.routing.replay->slots_of(call, 0),
                     spec.routing.replay->record(call).tokens[0]);
  }
  if (kind != RoutingSpec::kUniform && kind != RoutingSpec::kZipf &&
      kind != RoutingSpec::kHotExpert) {
    return absl::InvalidArgumentError(absl::StrCat(
        "KernelSlots: routing is ", spec.routing.text,
        ", expected uniform, zipf:S, hot_expert:P or a trace of one rank, which are of experts"));
  }
  if (spec.router.top_k < 1 || spec.router.top_k > spec.router.num_experts) {
    return absl::InvalidArgumentError(absl::StrCat("KernelSlots: top_k is ", spec.router.top_k,
                                                   ", expected 1 to the ", spec.router.num_experts,
                                                   " experts"));
  }
  // A gate is given logits, which are drawn whatever the shares are: those of zipf:0 are even.
  RoutingSpec routing = spec.routing;
  if (spec.op == KernelOp::kGate && kind == RoutingSpec::kUniform) {
    routing.kind = RoutingSpec::kZipf;
  }
  return DrawSlots(routing, {.tokens = spec.tokens,
                             .top_k = spec.router.top_k,
                             .num_experts = spec.router.num_experts,
                             .seed = spec.seed});
}

absl::StatusOr<std::vector<int64_t>> ExpertRows(const KernelSpec& spec, int64_t call) {
  MOE_ASSIGN_OR_RETURN(const TokenSlots slots, KernelSlots(spec, call));
  return CountSlots(slots, spec.router.num_experts);
}

namespace {

absl::StatusOr<std::unique_ptr<KernelCases>> MakeCasesOf(const KernelSpec& spec,
                                                         KernelDevice& device) {
  if (spec.op == KernelOp::kGate) return MakeGateCases(spec, device);
  return spec.op == KernelOp::kGemm ? MakeGemmCases(spec, device) : MakeRowCases(spec, device);
}

}  // namespace

absl::StatusOr<std::vector<KernelRow>> MeasureKernels(const KernelSpec& spec,
                                                      const MeasureOptions& options,
                                                      KernelDevice& device) {
  int64_t slots = 0;
  int64_t largest = 0;
  for (int64_t call = 0; call < CallsOf(spec.routing); ++call) {
    MOE_ASSIGN_OR_RETURN(const std::vector<int64_t> rows, ExpertRows(spec, call));
    slots = std::max(slots, std::accumulate(rows.begin(), rows.end(), int64_t{0}));
    largest = std::max(largest, *std::max_element(rows.begin(), rows.end()));
  }
  MOE_ASSIGN_OR_RETURN(const auto cases, MakeCasesOf(spec, device));
  CopyLimit copy(device);
  KernelLimit limit = [&](double work) {
    return copy.Measure(work);
  };
  const bool moves = spec.op != KernelOp::kGemm;
  if (!moves) {
    MOE_ASSIGN_OR_RETURN(limit, GemmLimit(spec, slots, device));
  }
  std::vector<KernelRow> rows;
  for (const KernelCase& one : cases->cases()) {
    double most = 0;
    for (int64_t call = 0; moves && call < CallsOf(spec.routing); ++call) {
      MOE_ASSIGN_OR_RETURN(const double work, one.timed.prepare(call));
      most = std::max(most, work);
    }
    MOE_RETURN_IF_ERROR(copy.Reserve(static_cast<int64_t>(most)));
    MOE_ASSIGN_OR_RETURN(const KernelTimes times, TimeKernel(one.timed, limit, options, device));
    rows.push_back({.pass = one.pass,
                    .kernel = one.kernel,
                    .spec = spec,
                    .place = device.place(),
                    .slots = slots,
                    .largest_rows = largest,
                    .bytes = static_cast<int64_t>(times.mean_work),
                    .times = times});
  }
  return rows;
}

Fields KernelFields(const KernelRow& row) {
  const KernelSpec& s = row.spec;
  const KernelTimes& times = row.times;
  const bool gate = s.op == KernelOp::kGate;
  const bool gemm = s.op == KernelOp::kGemm;
  Fields fields = {{"schema", gemm ? "moe.bench.gemm/1" : "moe.bench.kernel/1"},
                   {"op", NameOf(s.op)}};
  const auto add = [&](const Fields& more) {
    fields.insert(fields.end(), more.begin(), more.end());
  };
  add(gemm ? Fields{{"product", row.kernel}} : Fields{{"pass", row.pass}, {"kernel", row.kernel}});
  add({{"dtype", moe::NameOf(s.dtype)},
       {"tokens", s.tokens},
       {"topk", int64_t{s.router.top_k}},
       {"experts", int64_t{s.router.num_experts}},
       {"hidden", gate ? Cell() : Cell(s.hidden)},
       gemm ? Field{"ffn", s.ffn} : Field{"router", Cell::TextIf(gate, s.router.gate)},
       {"routing", s.routing.text},
       {"seed", s.seed}});
  AddPlace(row.place, fields);
  add({{gemm ? "rows" : "slots", row.slots}, {"largest_rows", row.largest_rows}});
  if (!gemm) add({{"size_bytes", row.bytes}});
  AddTimes(times.time_us, times.iterations, fields);
  add({{gemm ? "gflops_per_s" : "algbw_gbytes_per_s", times.work_per_ns},
       {gemm ? "peak_gflops_per_s" : "memcpy_gbytes_per_s", times.limit_per_ns},
       {gemm ? "peak_pct" : "memcpy_pct", times.limit_pct}});
  AddVerdict(times.wrong, "wrong elements", fields);
  return fields;
}

absl::Span<const Column> KernelColumns(KernelOp op) {
  static constexpr Column kGemm[] = {{"product", "product", "", -12},
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
  static constexpr Column kColumns[] = {{"pass", "pass", "", -9},
                                        {"kernel", "kernel", "", -12},
                                        {"slots", "slots", "", 8},
                                        {"largest_rows", "busiest", "", 8},
                                        {"size_bytes", "size", "(B)", 11},
                                        {"dtype", "type", "", 5},
                                        {"time_us", "time", "(us)", 9, 1},
                                        {"time_us_min", "i_min", "(us)", 9, 1},
                                        {"time_us_p99", "i_p99", "(us)", 9, 1},
                                        {"time_us_cv_pct", "i_cv%", "(%)", 7, 2},
                                        {"algbw_gbytes_per_s", "GB/s", "", 7, 2},
                                        {"memcpy_gbytes_per_s", "copy", "(GB/s)", 7, 2},
                                        {"memcpy_pct", "%copy", "(%)", 7, 1},
                                        {"nwrong", "#wrong", "", 7}};
  return op == KernelOp::kGemm ? absl::MakeConstSpan(kGemm) : absl::MakeConstSpan(kColumns);
}

}  // namespace moe::bench
