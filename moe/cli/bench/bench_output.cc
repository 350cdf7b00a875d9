#include "moe/cli/bench/bench_output.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/program.h"

namespace moe::cli {

BenchOutput::BenchOutput(const BenchCall& call, const bench::Fields& model)
    : call_(call), keys_(bench::KeysOf(Whole(model))) {
  const auto start = [&](const char* flag, std::optional<bench::TableWriter>& writer) {
    const auto form = bench::TableFormOf(call.settings.text(flag));  // "table": none of them
    if (form.has_value()) writer.emplace(*form, keys_);
  };
  start("output", out_);
  start("output-stderr", err_);
}

bench::Fields BenchOutput::Whole(bench::Fields row) const {
  bench::AddOrigin(call_.provenance, row);
  row.push_back({"settings", BenchIdentity(call_.settings, call_.operation)});
  return row;
}

absl::Status BenchOutput::Begin(const std::string& text) {
  if (err_.has_value()) PrintAside(err_->Begin());
  return Print(is_table() ? text : out_->Begin());
}

absl::Status BenchOutput::Add(const bench::Fields& row, const std::string& text) {
  rows_.push_back(Whole(row));
  const std::vector<bench::Cell> cells = bench::CellsOf(rows_.back());
  if (err_.has_value()) PrintAside(err_->Row(cells));
  return Print(is_table() ? text : out_->Row(cells));
}

absl::Status BenchOutput::End(const std::string& text) {
  if (err_.has_value()) PrintAside(err_->End());
  MOE_RETURN_IF_ERROR(Print(is_table() ? text : out_->End()));
  if (call_.options.json_path.empty()) return absl::OkStatus();
  std::vector<std::vector<bench::Cell>> cells;
  for (const bench::Fields& row : rows_) cells.push_back(bench::CellsOf(row));
  return WriteFile("-J", call_.options.json_path,
                   bench::WriteTable(bench::TableForm::kJson, keys_, cells));
}

absl::Status BenchOutput::CheckBound(absl::FunctionRef<std::string(size_t row)> where) const {
  for (size_t i = 0; i < rows_.size() && call_.fail_if.has_value(); ++i) {
    const auto lookup = [&](absl::string_view column) {
      return bench::NumberOf(rows_[i], column);
    };
    if (!call_.fail_if->Holds(lookup)) continue;
    return CheckFailed(absl::StrCat("--fail-if '", call_.fail_if->text(), "' holds ", where(i)));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
