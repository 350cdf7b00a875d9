#include "moe/cli/bench_gemm.h"

#include <algorithm>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "moe/bench/gemm_bench.h"
#include "moe/bench/tables.h"
#include "moe/cli/bench_output.h"
#include "moe/cli/exit_code.h"
#include "moe/cli/program.h"

namespace moe::cli {
namespace {

std::string About(const GemmBenchOptions& options) {
  const bench::GemmSpec& s = options.spec;
  return fmt::format(
      "# moe bench gemm: {} tokens x top-{} on {} experts, H {}, F {}, routing {}, seed {}, {} "
      "thread{}\n# time: median of at least {} calls, until i_cv% <= {} or {} s\n#\n",
      s.tokens, s.top_k, s.num_experts, s.hidden, s.ffn, s.routing.text, s.seed, options.threads,
      options.threads == 1 ? "" : "s", options.measure.iterations, options.measure.max_noise_pct,
      absl::ToDoubleSeconds(options.measure.budget));
}

absl::Status Verdict(const GemmBenchOptions& options, const std::vector<bench::GemmRow>& rows) {
  for (const bench::GemmRow& row : rows) {
    if (row.wrong > 0) {
      return WithExitCode(
          absl::InternalError(absl::StrCat(row.product, ": ", row.wrong,
                                           " of the sampled elements are wrong, expected none")),
          ExitCode::kCheckFailed);
    }
    if (!options.fail_if.has_value()) continue;
    const std::vector<std::string>& keys = bench::GemmKeys();
    const std::vector<bench::Cell> cells = bench::GemmCells(row);
    const auto lookup = [&](absl::string_view column) -> std::optional<double> {
      return cells[std::find(keys.begin(), keys.end(), column) - keys.begin()].number();
    };
    if (!options.fail_if->Holds(lookup)) continue;
    return WithExitCode(absl::InternalError(fmt::format(
                            "--fail-if '{}' holds for {}: {:.1f} GFLOP/s, {:.1f} % of the peak",
                            options.fail_if->text(), row.product, row.gflops_per_s, row.peak_pct)),
                        ExitCode::kCheckFailed);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunGemmBench(const BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const GemmBenchOptions options, MakeGemmBenchOptions(call, launch));
  if (!options.json_path.empty()) MOE_RETURN_IF_ERROR(CheckWritable("-J", options.json_path));
  ThreadPool threads(options.threads);
  MOE_ASSIGN_OR_RETURN(const std::vector<bench::GemmRow> rows,
                       bench::MeasureGemm(options.spec, options.measure, threads));
  std::vector<std::vector<bench::Cell>> cells;
  std::string table = About(options) + bench::GemmHead();
  for (const bench::GemmRow& row : rows) {
    cells.push_back(bench::GemmCells(row));
    table += bench::GemmLine(row);
  }
  const auto form = [&](bench::TableForm kind) {
    return bench::WriteTable(kind, bench::GemmKeys(), cells);
  };
  MOE_RETURN_IF_ERROR(Print(options.output.has_value() ? form(*options.output) : table));
  if (options.output_err.has_value()) PrintBenchForm(form(*options.output_err));
  MOE_RETURN_IF_ERROR(WriteBenchFile("-J", options.json_path, form(bench::TableForm::kJson)));
  return Verdict(options, rows);
}

}  // namespace moe::cli
