#include <memory>
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
#include "moe/cli/bench/bench_output.h"
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

// Prints and judges the rows. `names`: the columns that say which row it is.
absl::Status Show(const BenchCall& call, const std::string& about,
                  absl::Span<const bench::Column> columns, const std::vector<bench::Fields>& rows,
                  const std::string& foot, const std::vector<std::string>& names) {
  const double max_noise_pct = call.options.measure.max_noise_pct;
  BenchOutput output(call, rows.front());
  MOE_RETURN_IF_ERROR(
      output.Begin(absl::StrCat(about, TimeText(call, "median"), bench::TableHead(columns))));
  std::vector<double> cvs_pct;
  for (const bench::Fields& row : rows) {
    MOE_RETURN_IF_ERROR(output.Add(row, bench::TableLine(columns, row, max_noise_pct)));
    cvs_pct.push_back(*bench::NumberOf(row, "cv"));
  }
  MOE_RETURN_IF_ERROR(output.End(bench::NoiseFoot(cvs_pct, max_noise_pct) + foot));
  const auto which = [&](size_t i) {
    std::string text;
    for (const std::string& name : names) {
      absl::StrAppend(&text, bench::Find(rows[i], name)->text(), " ");
    }
    return text;
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const bench::Cell& wrong = *bench::Find(rows[i], "nwrong");
    if (!(wrong.number() > 0)) continue;
    return CheckFailed(
        absl::StrCat(which(i), "has ", wrong.text(), " wrong elements, expected none"));
  }
  return output.CheckBound([&](size_t i) {
    return absl::StrCat("for ", which(i), "with a time of ",
                        bench::Find(rows[i], "time_us")->text(), " us");
  });
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

absl::Status RunKernelBench(BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const bench::KernelSpec s, MakeKernelSpec(call, launch));
  MOE_RETURN_IF_ERROR(SetFailIf(
      bench::KernelFields(bench::KernelRow{.spec = bench::KernelSpec{.op = s.op}}), call));
  MOE_RETURN_IF_ERROR(CheckOutputs(call.settings, s.routing));
  ThreadPool threads(call.options.part.threads);
  MOE_ASSIGN_OR_RETURN(const auto device, bench::KernelDevice::Create(launch.device, threads));
  MOE_ASSIGN_OR_RETURN(const std::vector<bench::KernelRow> measured,
                       bench::MeasureKernels(s, call.options.measure, *device));
  std::vector<bench::Fields> rows;
  for (const bench::KernelRow& row : measured) rows.push_back(bench::KernelFields(row));
  const bool gemm = s.op == bench::KernelOp::kGemm;
  const std::string what =
      s.op == bench::KernelOp::kGate
          ? absl::StrCat("router ", s.router.gate)
          : absl::StrCat("H ", s.hidden, gemm ? absl::StrCat(", F ", s.ffn) : "");
  const std::string about =
      fmt::format("# moe bench {}: {} tokens x top-{} on {} experts, {}, routing {}, seed {}, {}\n",
                  call.operation, s.tokens, s.router.top_k, s.router.num_experts, what,
                  s.routing.text, s.seed, PlaceText(*device));
  using Names = std::vector<std::string>;
  return Show(call, about, bench::KernelColumns(s.op), rows, "",
              gemm ? Names{"product"} : Names{"op", "pass", "kernel"});
}

absl::Status RunLayerBench(BenchCall& call, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(const bench::LayerSpec s, MakeLayerSpec(call, launch));
  MOE_RETURN_IF_ERROR(SetFailIf(bench::LayerFields({}, {}), call));
  if (launch.rank() == 0) {
    MOE_RETURN_IF_ERROR(CheckOutputs(call.settings, s.routing.value_or(bench::RoutingSpec{})));
  }
  bench::LayerResult result;
  const auto body = [&](std::unique_ptr<Communicator> world) -> absl::Status {
    const bool first = world->rank() == 0;
    MOE_RETURN_IF_ERROR(CheckWorldSize(launch, *world));
    if (call.options.pin) MOE_RETURN_IF_ERROR(PinRank(launch, *world, s.threads));
    MOE_ASSIGN_OR_RETURN(const auto trace, RankTrace::Create(call.settings.text("trace"), *world));
    bench::MeasureOptions measure = call.options.measure;
    measure.trace = trace->recorder();
    MOE_ASSIGN_OR_RETURN(auto mine, bench::MeasureLayer(s, measure, std::move(world)));
    MOE_RETURN_IF_ERROR(trace->Write());
    if (first) result = std::move(mine);
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(RunRanks(RankOptions(launch, call.options.comm_timeout, "bench"), body));
  if (launch.rank() != 0) return absl::OkStatus();
  std::vector<bench::Fields> rows;
  for (const bench::LayerRow& row : result.rows) rows.push_back(bench::LayerFields(result, row));
  const std::string about = fmt::format(
      "# moe bench layer: {} rank{} ({}) x {} tokens x top-{} on {} experts, H {}, F {}, {}, {} "
      "thread{} a rank, {}\n",
      launch.world.ranks, Plural(launch.world.ranks), result.backend, s.tokens,
      s.layer.router.top_k, s.layer.router.num_experts, s.layer.router.hidden_size,
      s.layer.ffn_hidden_size, moe::NameOf(s.dtype), s.threads, Plural(s.threads), RouterText(s));
  const bench::LayerFigures& f = result.figures;
  const std::string foot = fmt::format(
      "# {:.0f} tokens/s, drop {:.2f}%, maxvio {:.2f}, dead {}, peak {:.1f} MiB a rank\n",
      f.tokens_per_s, 100 * f.drop_fraction, f.max_vio, f.dead_experts,
      static_cast<double>(f.peak_bytes) / (1 << 20));
  return Show(call, about, bench::LayerColumns(), rows, foot, {"pass", "phase"});
}

}  // namespace moe::cli
