#include "moe/cli/measure/bench_row.h"

#include <algorithm>
#include <array>
#include <cmath>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

namespace moe::measure {

namespace {

// Changes when a key changes its meaning or goes; new keys at the end of the list leave it.
constexpr char kSchema[] = "moe.bench/1";

Cell CountOrNull(int64_t value) {
  if (value < 0) return {};
  return value;
}

constexpr char kNotMeasured[] = "N/A";

bool Reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduceScatter;
}

// As many decimals, at most two, as `width` columns have room for; "1.2e+09" past that.
std::string Fitted(double value, int width) {
  if (!std::isfinite(value)) return absl::StrFormat("%*s", width, kNotMeasured);
  for (int decimals = 2; decimals >= 0; --decimals) {
    std::string text = absl::StrFormat("%*.*f", width, decimals, value);
    if (text.size() == static_cast<size_t>(width)) return text;
  }
  return absl::StrFormat("%*.0e", width, value);
}

// "1.71@0": max over mean, and the rank of the max if there is one; as many decimals as there is
// room for.
std::string ImbalanceText(double imbalance, int busiest, int width) {
  const std::string rank = busiest < 0 ? "" : absl::StrCat("@", busiest);
  const std::string number = Fitted(imbalance, std::max(4, width - static_cast<int>(rank.size())));
  return absl::StrFormat("%*s", width,
                         absl::StrCat(absl::StripLeadingAsciiWhitespace(number), rank));
}

std::string WrongText(const BenchRow& row) {
  if (row.wrong < 0) return absl::StrFormat("%6s", kNotMeasured);
  return absl::StrFormat("%6g", static_cast<double>(row.wrong));
}

// nccl-tests' name of a type: "float", "bfloat16".
const char* NcclTypeName(DType type) {
  constexpr std::pair<DType, const char*> kNames[] = {
      {DType::kFloat32, "float"}, {DType::kFloat64, "double"}, {DType::kBFloat16, "bfloat16"},
      {DType::kFloat16, "half"},  {DType::kInt32, "int32"},    {DType::kInt64, "int64"},
      {DType::kUInt8, "uint8"}};
  for (const auto& [known, name] : kNames) {
    if (known == type) return name;
  }
  return "?";
}

// Columns 1 to 5 of both tables.
std::string What(const BenchRow& row) {
  return absl::StrFormat("%12d  %12d  %8s  %6s  %6d", row.size_bytes, row.count,
                         NcclTypeName(row.dtype), Reduces(row.op) ? "sum" : "none", -1);
}

std::string Half(const BenchRow& row) {
  return absl::StrCat("  ", Fitted(row.time_us, 7), "  ", Fitted(row.algbw(), 6), "  ",
                      Fitted(row.busbw(), 6), "  ", WrongText(row));
}

// The same row of the call in its other form.
BenchRow OtherForm(BenchRow row) {
  row.time_us = row.other_time_us;
  row.wrong = row.other_wrong;
  return row;
}

std::string HeadLine(const char* size, const char* count, const char* type, const char* op,
                     const char* root) {
  return absl::StrFormat("# %10s  %12s  %8s  %6s  %6s", size, count, type, op, root);
}

std::string HalfHead(const char* time, const char* algbw, const char* busbw, const char* wrong) {
  return absl::StrFormat("  %7s  %6s  %6s  %6s", time, algbw, busbw, wrong);
}

// The largest off the diagonal; with one rank, its own.
double Largest(const HeatMap& map) {
  double largest = 0;
  for (int s = 0; s < map.ranks; ++s) {
    for (int d = 0; d < map.ranks; ++d) {
      if ((s != d || map.ranks == 1) && std::isfinite(map.at(s, d))) {
        largest = std::max(largest, map.at(s, d));
      }
    }
  }
  return largest;
}

// 0 .. 1.
double Share(double value, double largest) {
  if (!std::isfinite(value) || largest <= 0) return 0;
  return std::clamp(value / largest, 0.0, 1.0);
}

std::string NumberText(double value) {
  return std::isfinite(value) ? absl::StrFormat("%.2f", value) : "-";
}

}  // namespace

double AlgorithmBandwidth(int64_t size_bytes, double time_us) {
  if (std::isnan(time_us)) return time_us;
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
          {"wait_pct", row.wait_pct, "wait (%)"},
          {"slow_rank", CountOrNull(row.slow_rank)},
          {"bytes_self", CountOrNull(row.bytes_self)},
          {"bytes_same_host", CountOrNull(row.bytes_same_host)},
          {"bytes_cross_host", CountOrNull(row.bytes_cross_host)},
          {"memcpy_gbytes_per_s", row.memcpy_gbytes_per_s},
          {"memcpy_pct", row.memcpy_pct()},
          {"source", CountOrNull(row.source)},
          {"destination", CountOrNull(row.destination)},
          {"status", row.status()},
          {"error", Cell::TextIf(row.wrong > 0, "wrong elements")},
          {"busiest_tx", CountOrNull(row.busiest_sender)},
          {"busiest_rx", CountOrNull(row.busiest_receiver)}};
}

std::string BenchHead() {
  return absl::StrCat(
      HeadLine("size", "count", "type", "redop", "root"),
      HalfHead("time", "algbw", "busbw", "#wrong"),
      absl::StrFormat("  %7s  %7s  %7s  %7s  %7s  %8s  %8s  %6s  %4s  %7s\n", "i_min", "i_max",
                      "i_p50", "i_p99", "i_cv%", "imb_tx", "imb_rx", "wait%", "slow", "%memcpy"),
      HeadLine("(B)", "(elements)", "", "", ""), HalfHead("(us)", "(GB/s)", "(GB/s)", ""),
      absl::StrFormat("  %7s  %7s  %7s  %7s  %7s  %18s  %6s  %4s  %7s\n", "(us)", "(us)", "(us)",
                      "(us)", "(%)", "(max/mean@rank)", "(%)", "rank", "(%)"));
}

std::string BenchLine(const BenchRow& row, double max_noise_pct) {
  const Statistics& t = row.samples_us;
  return absl::StrCat(
      What(row), Half(row), "  ", Fitted(t.min, 7), "  ", Fitted(t.max, 7), "  ", Fitted(t.p50, 7),
      "  ", Fitted(t.p99, 7), "  ", Fitted(t.cv_pct, 6),
      std::string(1, NoiseMark(t.cv_pct, max_noise_pct)), "  ",
      ImbalanceText(row.imbalance_sent, row.busiest_sender, 8), "  ",
      ImbalanceText(row.imbalance_received, row.busiest_receiver, 8), "  ", Fitted(row.wait_pct, 6),
      absl::StrFormat("  %4s  ", row.slow_rank < 0 ? "-" : absl::StrCat(row.slow_rank)),
      Fitted(row.memcpy_pct(), 7), "\n");
}

std::string NcclHead() {
  const std::string names = HalfHead("time", "algbw", "busbw", "#wrong");
  const std::string units = HalfHead("(us)", "(GB/s)", "(GB/s)", "");
  return absl::StrCat(HeadLine("", "", "", "", ""),
                      "           out-of-place                       in-place          \n",
                      HeadLine("size", "count", "type", "redop", "root"), names, names, " \n",
                      HeadLine("(B)", "(elements)", "", "", ""), units, units, " \n");
}

std::string NcclLine(const BenchRow& row) {
  const std::string own = Half(row);
  const std::string other = Half(OtherForm(row));
  return absl::StrCat(What(row), row.in_place ? other : own, row.in_place ? own : other, "\n");
}

std::string NcclFoot(absl::Span<const BenchRow> rows) {
  int64_t wrong = 0;
  double sum = 0;
  int measured = 0;
  for (const BenchRow& row : rows) {
    const bool inside = row.source >= 0 && row.source == row.destination && row.ranks > 1;
    for (const BenchRow& form : {row, OtherForm(row)}) {
      wrong += std::max<int64_t>(0, form.wrong);
      if (inside || !std::isfinite(form.time_us)) continue;
      sum += form.busbw();
      ++measured;
    }
  }
  const double busbw = measured > 0 ? sum / measured : 0;
  return absl::StrFormat("# %-20s : %d %s\n# %-20s : %g \n#\n", "Out of bounds values", wrong,
                         wrong == 0 ? "OK" : "FAILED", "Avg bus bandwidth", busbw);
}

std::string BenchFoot(absl::Span<const BenchRow> rows) {
  std::string text = NcclFoot(rows);
  const BenchRow* largest = nullptr;
  for (const BenchRow& row : rows) {
    if (largest == nullptr || row.size_bytes > largest->size_bytes) largest = &row;
  }
  if (largest == nullptr) return text;
  absl::StrAppend(&text, absl::StrFormat("# %-20s : %s\n", "Algorithm", largest->algorithm));
  if (largest->bytes_self < 0) {
    absl::StrAppend(&text, absl::StrFormat("# %-20s : not known: the library of %s decides\n",
                                           "Bytes by distance", largest->transport));
  } else {
    absl::StrAppend(
        &text, absl::StrFormat("# %-20s : self %d, same host %d, cross host %d "
                               "(all ranks, one call of size %d; %d host%s)\n",
                               "Bytes by distance", largest->bytes_self, largest->bytes_same_host,
                               largest->bytes_cross_host, largest->size_bytes, largest->hosts,
                               largest->hosts == 1 ? "" : "s"));
  }
  if (largest->ranks == 1 && BusFactor(largest->op, 1) == 0) {
    absl::StrAppend(&text, "# With one rank nothing crosses a bus: busbw is 0.\n");
  }
  return text;
}

std::string HeatText(const HeatMap& map) {
  constexpr std::array<const char*, 5> kBlocks = {" ", "\u2591", "\u2592", "\u2593", "\u2588"};
  const double largest = Largest(map);
  std::string text = absl::StrCat("# ", map.title, "\n# from\\to");
  for (int d = 0; d < map.ranks; ++d) absl::StrAppend(&text, absl::StrFormat("  %8d ", d));
  text += "\n";
  for (int s = 0; s < map.ranks; ++s) {
    absl::StrAppend(&text, absl::StrFormat("%9d", s));
    for (int d = 0; d < map.ranks; ++d) {
      const double share = Share(map.at(s, d), largest);
      const auto block = static_cast<size_t>(std::lround(share * (kBlocks.size() - 1)));
      absl::StrAppend(&text, absl::StrFormat("  %8s", NumberText(map.at(s, d))), kBlocks[block]);
    }
    text += "\n";
  }
  return text;
}

}  // namespace moe::measure
