#include "moe/cli/bench_experts.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "moe/bench/gemm_bench.h"
#include "moe/bench/layer_bench.h"
#include "moe/bench/tables.h"
#include "moe/cli/bench_output.h"
#include "moe/cli/exit_code.h"
#include "moe/cli/pin.h"
#include "moe/cli/program.h"

namespace moe::cli {
namespace {

const char* Plural(int count) {
  return count == 1 ? "" : "s";
}

std::string TimeText(int iterations, double max_noise_pct, absl::Duration budget) {
  return fmt::format("# time: median of at least {} calls, until i_cv% <= {} or {} s\n#\n",
                     iterations, max_noise_pct, absl::ToDoubleSeconds(budget));
}

// Rows as cells, with the names of their columns.
struct Results {
  const std::vector<std::string>& keys;
  std::vector<std::vector<bench::Cell>> cells;
  std::string table;  // for people

  const bench::Cell& at(size_t row, absl::string_view key) const {
    return cells[row][std::find(keys.begin(), keys.end(), key) - keys.begin()];
  }
};

absl::Status CheckJsonPath(const BenchOutputOptions& output) {
  return output.json_path.empty() ? absl::OkStatus() : CheckWritable("-J", output.json_path);
}

absl::Status Show(const Results& results, const BenchOutputOptions& output) {
  const auto form = [&](bench::TableForm kind) {
    return bench::WriteTable(kind, results.keys, results.cells);
  };
  MOE_RETURN_IF_ERROR(Print(output.form.has_value() ? form(*output.form) : results.table));
  if (output.form_err.has_value()) PrintBenchForm(form(*output.form_err));
  return WriteBenchFile("-J", output.json_path, form(bench::TableForm::kJson));
}

// `names`: the columns that say which row it is.
absl::Status Verdict(const Results& results, const BenchOutputOptions& output,
                     const std::vector<std::string>& names) {
  for (size_t row = 0; row < results.cells.size(); ++row) {
    std::string which;
    for (const std::string& name : names)
      absl::StrAppend(&which, results.at(row, name).text(), " ");
    if (results.at(row, "nwrong").number() > 0) {
      return WithExitCode(
          absl::InternalError(absl::StrCat(which, "has ", results.at(row, "nwrong").text(),
                                           " wrong elements, expected none")),
          ExitCode::kCheckFailed);
    }
    const auto lookup = [&](absl::string_view column) -> std::optional<double> {
      return results.at(row, column).number();
    };
    if (!output.fail_if.has_value() || !output.fail_if->Holds(lookup)) continue;
    return WithExitCode(absl::InternalError(fmt::format(
                            "--fail-if '{}' holds for {}with a time of {} us",
                            output.fail_if->text(), which, results.at(row, "time_us").text())),
                        ExitCode::kCheckFailed);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status RunGemmBench(const BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const GemmBenchOptions options, MakeGemmBenchOptions(call, launch));
  MOE_RETURN_IF_ERROR(CheckJsonPath(options.output));
  ThreadPool threads(options.threads);
  MOE_ASSIGN_OR_RETURN(const std::vector<bench::GemmRow> rows,
                       bench::MeasureGemm(options.spec, options.measure, threads));
  const bench::GemmSpec& s = options.spec;
  Results results{bench::GemmKeys(), {}, {}};
  results.table = absl::StrCat(
      fmt::format("# moe bench gemm: {} tokens x top-{} on {} experts, H {}, F {}, routing {}, "
                  "seed {}, {} thread{}\n",
                  s.tokens, s.top_k, s.num_experts, s.hidden, s.ffn, s.routing.text, s.seed,
                  options.threads, Plural(options.threads)),
      TimeText(options.measure.iterations, options.measure.max_noise_pct, options.measure.budget),
      bench::GemmHead());
  for (const bench::GemmRow& row : rows) {
    results.cells.push_back(bench::GemmCells(row));
    results.table += bench::GemmLine(row);
  }
  MOE_RETURN_IF_ERROR(Show(results, options.output));
  return Verdict(results, options.output, {"product"});
}

absl::Status RunLayerBench(const BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const LayerBenchOptions options, MakeLayerBenchOptions(call, launch));
  if (launch.rank() == 0) MOE_RETURN_IF_ERROR(CheckJsonPath(options.output));
  std::vector<bench::LayerRow> rows;
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    if (world->size() != launch.world.ranks) {
      return absl::InvalidArgumentError(absl::StrCat("--ranks is ", launch.world.ranks,
                                                     ", expected the ", world->size(),
                                                     " that the launcher started"));
    }
    if (options.run.pin) MOE_RETURN_IF_ERROR(PinRank(launch, *world));
    MOE_ASSIGN_OR_RETURN(auto mine,
                         bench::MeasureLayer(options.spec, options.measure, std::move(world)));
    if (first) rows = std::move(mine);
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch, options.run.comm_timeout, "bench"), body));
  if (launch.rank() != 0) return absl::OkStatus();
  const bench::LayerSpec& s = options.spec;
  Results results{bench::LayerKeys(), {}, {}};
  results.table = absl::StrCat(
      fmt::format(
          "# moe bench layer: {} ranks ({}) x {} tokens x top-{} on {} experts, H {}, F {}, "
          "{}, {} thread{} a rank\n",
          launch.world.ranks, rows[0].backend, s.tokens, s.top_k, s.num_experts, s.hidden, s.ffn,
          moe::NameOf(s.dtype), s.threads, Plural(s.threads)),
      TimeText(options.measure.iterations, options.measure.max_noise_pct, options.measure.budget),
      bench::LayerHead());
  for (const bench::LayerRow& row : rows) {
    results.cells.push_back(bench::LayerCells(row));
    results.table += bench::LayerLine(row);
  }
  MOE_RETURN_IF_ERROR(Show(results, options.output));
  return Verdict(results, options.output, {"pass", "phase"});
}

}  // namespace moe::cli
