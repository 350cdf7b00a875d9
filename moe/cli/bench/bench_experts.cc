#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/bench/bench_options.h"
#include "moe/cli/bench/kernel_bench.h"
#include "moe/cli/bench/kernel_device.h"
#include "moe/cli/bench/layer_bench.h"
#include "moe/cli/bench/tables.h"

namespace moe::cli {
namespace {

const char* Plural(int count) {
  return count == 1 ? "" : "s";
}

std::string PlaceText(const bench::KernelDevice& device) {
  const bench::Place place = device.place();
  if (!device.is_cpu()) return CudaDevices()->front().name;
  return absl::StrCat(place.threads, " thread", Plural(place.threads));
}

// Rows, and what stands above them in the table.
struct Results {
  std::string about;
  absl::Span<const bench::Column> columns;
  const BenchCall& call;
  double max_noise_pct;
  std::vector<bench::Fields> rows;

  void Add(bench::Fields row) {
    bench::AddOrigin(call.provenance, row);
    row.push_back({"settings", BenchIdentity(call.settings, call.operation)});
    rows.push_back(std::move(row));
  }

  std::string Table() const {
    std::string text = absl::StrCat(about, bench::TableHead(columns));
    std::vector<double> cvs_pct;
    for (const bench::Fields& row : rows) {
      text += bench::TableLine(columns, row, max_noise_pct);
      cvs_pct.push_back(*bench::NumberOf(row, "cv"));
    }
    return text + bench::NoiseFoot(cvs_pct, max_noise_pct);
  }
};

absl::Status Show(const Results& results, const BenchOutputOptions& output) {
  std::vector<std::vector<bench::Cell>> cells;
  for (const bench::Fields& row : results.rows) cells.push_back(bench::CellsOf(row));
  const auto form = [&](bench::TableForm kind) {
    return bench::WriteTable(kind, bench::KeysOf(results.rows[0]), cells);
  };
  MOE_RETURN_IF_ERROR(Print(output.form.has_value() ? form(*output.form) : results.Table()));
  if (output.form_err.has_value()) PrintAside(form(*output.form_err));
  if (output.json_path.empty()) return absl::OkStatus();
  return WriteFile("-J", output.json_path, form(bench::TableForm::kJson));
}

// `names`: the columns that say which row it is.
absl::Status CheckRows(const Results& results, const BenchOutputOptions& output,
                       const std::vector<std::string>& names) {
  for (const bench::Fields& row : results.rows) {
    std::string which;
    for (const std::string& name : names) {
      absl::StrAppend(&which, bench::Find(row, name)->text(), " ");
    }
    const bench::Cell& wrong = *bench::Find(row, "nwrong");
    if (wrong.number() > 0) {
      return WithExitCode(absl::InternalError(absl::StrCat(which, "has ", wrong.text(),
                                                           " wrong elements, expected none")),
                          ExitCode::kCheckFailed);
    }
    const auto lookup = [&](absl::string_view column) {
      return bench::NumberOf(row, column);
    };
    if (!output.fail_if.has_value() || !output.fail_if->Holds(lookup)) continue;
    return WithExitCode(absl::InternalError(fmt::format(
                            "--fail-if '{}' holds for {}with a time of {} us",
                            output.fail_if->text(), which, bench::Find(row, "time_us")->text())),
                        ExitCode::kCheckFailed);
  }
  return absl::OkStatus();
}

std::string RouterText(const bench::LayerSpec& spec) {
  const RouterConfig& router = spec.layer.router;
  const std::string capacity = router.capacity_factor.has_value()
                                   ? absl::StrCat(", capacity ", *router.capacity_factor)
                                   : "";
  const std::string chosen = spec.routing.has_value() ? absl::StrCat("routing ", spec.routing->text)
                                                      : absl::StrCat("router ", router.gate);
  return chosen + capacity;
}

}  // namespace

absl::Status RunKernelBench(const BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const KernelBenchOptions options, MakeKernelBenchOptions(call, launch));
  MOE_RETURN_IF_ERROR(CheckOutputs(call.settings, options.spec.routing));
  ThreadPool threads(options.threads);
  MOE_ASSIGN_OR_RETURN(const auto device, bench::KernelDevice::Create(launch.device, threads));
  MOE_ASSIGN_OR_RETURN(const std::vector<bench::KernelRow> rows,
                       bench::MeasureKernels(options.spec, options.measure, *device));
  const bench::KernelSpec& s = options.spec;
  const bool gemm = s.op == bench::KernelOp::kGemm;
  const std::string what =
      s.op == bench::KernelOp::kGate
          ? absl::StrCat("router ", s.router.gate)
          : absl::StrCat("H ", s.hidden, gemm ? absl::StrCat(", F ", s.ffn) : "");
  Results results{
      absl::StrCat(
          fmt::format("# moe bench {}: {} tokens x top-{} on {} experts, {}, routing {}, seed {}, "
                      "{}\n",
                      call.operation, s.tokens, s.router.top_k, s.router.num_experts, what,
                      s.routing.text, s.seed, PlaceText(*device)),
          TimeText(call, "median", options.measure)),
      bench::KernelColumns(s.op),
      call,
      options.measure.max_noise_pct,
      {}};
  for (const bench::KernelRow& row : rows) results.Add(bench::KernelFields(row));
  MOE_RETURN_IF_ERROR(Show(results, options.output));
  using Names = std::vector<std::string>;
  return CheckRows(results, options.output,
                   gemm ? Names{"product"} : Names{"op", "pass", "kernel"});
}

absl::Status RunLayerBench(const BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const LayerBenchOptions options, MakeLayerBenchOptions(call, launch));
  if (launch.rank() == 0) {
    MOE_RETURN_IF_ERROR(
        CheckOutputs(call.settings, options.spec.routing.value_or(bench::RoutingSpec{})));
  }
  bench::LayerResult result;
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_RETURN_IF_ERROR(CheckWorldSize(launch, *world));
    if (options.run.pin) MOE_RETURN_IF_ERROR(PinRank(launch, *world, options.spec.threads));
    MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call.settings.text("trace"), *world));
    bench::MeasureOptions measure = options.measure;
    measure.trace = trace->recorder();
    MOE_ASSIGN_OR_RETURN(auto mine, bench::MeasureLayer(options.spec, measure, std::move(world)));
    MOE_RETURN_IF_ERROR(trace->Write());
    if (first) result = std::move(mine);
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch, options.run.comm_timeout, "bench"), body));
  if (launch.rank() != 0) return absl::OkStatus();
  const bench::LayerSpec& s = options.spec;
  const bench::LayerFigures& f = result.figures;
  Results results{
      absl::StrCat(
          fmt::format(
              "# moe bench layer: {} rank{} ({}) x {} tokens x top-{} on {} experts, H {}, F {}, "
              "{}, {} thread{} a rank, {}\n",
              launch.world.ranks, Plural(launch.world.ranks), result.backend, s.tokens,
              s.layer.router.top_k, s.layer.router.num_experts, s.layer.router.hidden_size,
              s.layer.ffn_hidden_size, moe::NameOf(s.dtype), s.threads, Plural(s.threads),
              RouterText(s)),
          TimeText(call, "median", options.measure)),
      bench::LayerColumns(),
      call,
      options.measure.max_noise_pct,
      {}};
  for (const bench::LayerRow& row : result.rows) {
    results.Add(bench::LayerFields(result, row));
  }
  MOE_RETURN_IF_ERROR(Show(results, options.output));
  if (!options.output.form.has_value()) {
    MOE_RETURN_IF_ERROR(Print(fmt::format(
        "# {:.0f} tokens/s, drop {:.2f}%, maxvio {:.2f}, dead {}, peak {:.1f} MiB a rank\n",
        f.tokens_per_s, 100 * f.drop_fraction, f.max_vio, f.dead_experts,
        static_cast<double>(f.peak_bytes) / (1 << 20))));
  }
  return CheckRows(results, options.output, {"pass", "phase"});
}

}  // namespace moe::cli
