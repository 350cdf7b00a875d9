#include "moe/bench/bench_table.h"

#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

namespace moe::bench {
namespace {

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

std::string WrongText(const BenchRow& row) {
  if (row.wrong < 0) return absl::StrFormat("%6s", kNotMeasured);
  return absl::StrFormat("%6g", static_cast<double>(row.wrong));
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

std::string EmptyHalf() {
  return absl::StrFormat("  %7s  %6s  %6s  %6s", kNotMeasured, kNotMeasured, kNotMeasured,
                         kNotMeasured);
}

std::string HeadLine(const char* size, const char* count, const char* type, const char* op,
                     const char* root) {
  return absl::StrFormat("# %10s  %12s  %8s  %6s  %6s", size, count, type, op, root);
}

std::string HalfHead(const char* time, const char* algbw, const char* busbw, const char* wrong) {
  return absl::StrFormat("  %7s  %6s  %6s  %6s", time, algbw, busbw, wrong);
}

}  // namespace

const char* NcclTypeName(DType type) {
  switch (type) {
    case DType::kFloat32:
      return "float";
    case DType::kFloat64:
      return "double";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "half";
    case DType::kInt32:
      return "int32";
    case DType::kInt64:
      return "int64";
    case DType::kUInt8:
      return "uint8";
  }
  return "?";
}

std::string BenchHead() {
  return absl::StrCat(
      HeadLine("size", "count", "type", "redop", "root"),
      HalfHead("time", "algbw", "busbw", "#wrong"),
      absl::StrFormat("  %7s  %7s  %7s  %7s  %6s  %6s  %6s  %4s  %7s\n", "i_min", "i_max", "i_p99",
                      "i_cv%", "imb_tx", "imb_rx", "wait%", "slow", "%memcpy"),
      HeadLine("(B)", "(elements)", "", "", ""), HalfHead("(us)", "(GB/s)", "(GB/s)", ""),
      absl::StrFormat("  %7s  %7s  %7s  %7s  %14s  %6s  %4s  %7s\n", "(us)", "(us)", "(us)", "(%)",
                      "(max/mean)", "(%)", "rank", "(%)"));
}

std::string BenchLine(const BenchRow& row) {
  const Statistics& t = row.samples_us;
  return absl::StrCat(What(row), Half(row), "  ", Fitted(t.min, 7), "  ", Fitted(t.max, 7), "  ",
                      Fitted(t.p99, 7), "  ", Fitted(t.cv_pct, 7), "  ",
                      Fitted(row.imbalance_sent, 6), "  ", Fitted(row.imbalance_received, 6), "  ",
                      Fitted(row.wait_pct, 6), absl::StrFormat("  %4d  ", row.slow_rank),
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
  return absl::StrCat(What(row), row.in_place ? EmptyHalf() : Half(row),
                      row.in_place ? Half(row) : EmptyHalf(), "\n");
}

std::string NcclFoot(absl::Span<const BenchRow> rows) {
  int64_t wrong = 0;
  double busbw = 0;
  for (const BenchRow& row : rows) {
    wrong += row.wrong > 0 ? row.wrong : 0;
    busbw += row.busbw();
  }
  if (!rows.empty()) busbw /= static_cast<double>(rows.size());
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

}  // namespace moe::bench
