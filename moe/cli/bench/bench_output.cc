#include "moe/cli/bench/bench_output.h"

#include <cstdio>
#include <optional>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/program.h"
#include "moe/cli/bench/bench_row.h"

namespace moe::cli {
namespace {

bench::HeatMap HeatMapOf(absl::Span<const bench::BenchRow> rows) {
  bench::HeatMap map{.ranks = rows[0].ranks, .gbytes_per_s = {}, .title = {}};
  for (const bench::BenchRow& row : rows) map.gbytes_per_s.push_back(row.algbw());
  map.title = absl::StrCat("GB/s between ranks, ", rows[0].size_bytes, " bytes, ",
                           rows[0].transport, "; the diagonal copies inside the rank");
  return map;
}

}  // namespace

void PrintBenchForm(const std::string& text) {
  std::fputs(text.c_str(), stderr);
  std::fflush(stderr);
}

BenchOutput::BenchOutput(const BenchOptions& options) : options_(options) {
  const auto writer = [](std::optional<bench::TableForm> form) {
    return form.has_value()
               ? std::make_unique<bench::TableWriter>(*form, bench::KeysOf(bench::BenchFields({})))
               : nullptr;
  };
  out_ = writer(options.output.form);
  err_ = writer(options.output.form_err);
}

absl::Status BenchOutput::Begin(const std::string& about) {
  if (err_ != nullptr) PrintBenchForm(err_->Begin());
  if (out_ != nullptr) return Print(out_->Begin());
  if (options_.format == BenchFormat::kNccl) return Print(absl::StrCat(about, bench::NcclHead()));
  return Print(absl::StrCat(about, pairs() ? "" : bench::BenchHead()));
}

absl::Status BenchOutput::Add(absl::Span<const bench::BenchRow> rows) {
  std::string text;
  for (const bench::BenchRow& row : rows) {
    const std::vector<bench::Cell> cells = bench::CellsOf(bench::BenchFields(row));
    if (err_ != nullptr) PrintBenchForm(err_->Row(cells));
    if (out_ != nullptr) {
      text += out_->Row(cells);
    } else if (options_.format == BenchFormat::kNccl) {
      text += bench::NcclLine(row);
    } else if (!pairs()) {
      text += bench::BenchLine(row, options_.measure.max_noise_pct);
    }
  }
  if (out_ == nullptr && options_.format == BenchFormat::kTable && pairs()) {
    text = bench::HeatText(HeatMapOf(rows));
  }
  rows_.insert(rows_.end(), rows.begin(), rows.end());
  last_.assign(rows.begin(), rows.end());
  return Print(text);
}

std::string BenchOutput::Foot() const {
  std::vector<double> cvs_pct;
  for (const bench::BenchRow& row : rows_) cvs_pct.push_back(row.samples_us.cv_pct);
  const bool short_foot = options_.format == BenchFormat::kNccl || pairs();
  return (short_foot ? bench::NcclFoot(rows_) : bench::BenchFoot(rows_)) +
         bench::NoiseFoot(cvs_pct, options_.measure.max_noise_pct);
}

absl::Status BenchOutput::End() {
  if (err_ != nullptr) PrintBenchForm(err_->End());
  MOE_RETURN_IF_ERROR(Print(out_ != nullptr ? out_->End() : Foot()));
  std::vector<std::vector<bench::Cell>> cells;
  for (const bench::BenchRow& row : rows_) {
    cells.push_back(bench::CellsOf(bench::BenchFields(row)));
  }
  if (!options_.output.json_path.empty()) {
    MOE_RETURN_IF_ERROR(WriteFile(
        "-J", options_.output.json_path,
        bench::WriteTable(bench::TableForm::kJson, bench::KeysOf(bench::BenchFields({})), cells)));
  }
  if (options_.svg_path.empty()) return absl::OkStatus();
  return WriteFile("--svg", options_.svg_path, bench::HeatSvg(HeatMapOf(last_)));
}

}  // namespace moe::cli
