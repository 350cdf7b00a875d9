#include "moe/bench/bench_row.h"

#include <cmath>
#include <iterator>

namespace moe::bench {
namespace {

constexpr const char* kOpNames[] = {"alltoall",      "alltoallv", "allreduce", "allgather",
                                    "reducescatter", "p2p",       "memcpy"};

// Changes when a key changes its meaning or goes; new keys at the end of the list leave it.
constexpr char kSchema[] = "moe.bench/1";

Cell CountOrNull(int64_t value) {
  if (value < 0) return {};
  return value;
}

}  // namespace

const char* NameOf(Op op) {
  return kOpNames[static_cast<size_t>(op)];
}

std::optional<Op> OpOf(absl::string_view name) {
  for (size_t i = 0; i < std::size(kOpNames); ++i) {
    if (name == kOpNames[i]) return static_cast<Op>(i);
  }
  return std::nullopt;
}

double AlgorithmBandwidth(int64_t size_bytes, double time_us) {
  return time_us > 0 ? static_cast<double>(size_bytes) / time_us * 1e-3 : 0;
}

double BusFactor(Op op, int ranks) {
  const double n = ranks;
  switch (op) {
    case Op::kAllReduce:
      return 2 * (n - 1) / n;
    case Op::kPointToPoint:
    case Op::kMemcpy:
      return 1;
    default:
      return (n - 1) / n;
  }
}

Fields BenchFields(const BenchRow& row) {
  const Statistics& t = row.samples_us;
  return {{"schema", kSchema},
          {"op", NameOf(row.op)},
          {"algorithm", row.algorithm},
          {"backend", row.backend},
          {"transport", row.transport},
          {"ranks", int64_t{row.ranks}},
          {"hosts", int64_t{row.hosts}},
          {"routing", row.routing},
          {"seed", row.seed},
          {"dtype", moe::NameOf(row.dtype)},
          {"size_bytes", row.size_bytes},
          {"count", row.count},
          {"iters", row.iterations},
          {"time_us", row.time_us},
          {"time_us_min", t.min},
          {"time_us_max", t.max},
          {"time_us_p50", t.p50},
          {"time_us_p99", t.p99},
          {"time_us_cv_pct", t.cv_pct},
          {"algbw_gbytes_per_s", row.algbw()},
          {"busbw_gbytes_per_s", row.busbw()},
          {"nwrong", CountOrNull(row.wrong)},
          {"imb_tx", row.imbalance_sent},
          {"imb_rx", row.imbalance_received},
          {"wait_pct", row.wait_pct},
          {"slow_rank", int64_t{row.slow_rank}},
          {"bytes_self", CountOrNull(row.bytes_self)},
          {"bytes_same_host", CountOrNull(row.bytes_same_host)},
          {"bytes_cross_host", CountOrNull(row.bytes_cross_host)},
          {"memcpy_gbytes_per_s", row.memcpy_gbytes_per_s},
          {"memcpy_pct", row.memcpy_pct()},
          {"source", CountOrNull(row.source)},
          {"destination", CountOrNull(row.destination)},
          {"status", row.status()},
          {"error", row.wrong > 0 ? Cell("wrong elements") : Cell()},
          {"settings", row.settings}};
}

}  // namespace moe::bench
