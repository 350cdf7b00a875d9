#include "moe/cli/bench_flags.h"

#include <memory>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/exit_code.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/output_paths.h"
#include "moe/cli/program.h"
#include "moe/io/file.h"
#include "moe/io/routing_trace.h"

namespace moe::cli {
namespace {

absl::string_view TextOf(const MappedFile& file) {
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

absl::Status ReadMatrix(absl::string_view text, int ranks, bench::RoutingSpec& routing) {
  auto weights = bench::ParseTrafficMatrix(text, ranks);
  if (!weights.ok()) {
    return WithExitCode(absl::InvalidArgumentError(absl::StrCat("--routing: '", routing.path,
                                                                "': ", weights.status().message())),
                        ExitCode::kBadInput);
  }
  routing.weights = *std::move(weights);
  return absl::OkStatus();
}

absl::Status ReadTrace(absl::string_view text, int ranks, bench::RoutingSpec& routing) {
  const auto trace = ParseRoutingTrace(routing.path, text);
  MOE_RETURN_IF_ERROR(InputError("--routing", trace.status()));
  auto replay = bench::Replay::Create(*trace, ranks);
  if (!replay.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--routing is ", routing.text, ": ", replay.status().message()));
  }
  routing.replay = std::make_shared<const bench::Replay>(*std::move(replay));
  return absl::OkStatus();
}

}  // namespace

DType TypeOf(absl::string_view name) {
  if (name == "f64" || name == "double") return DType::kFloat64;
  if (name == "bf16" || name == "bfloat16") return DType::kBFloat16;
  if (name == "f16" || name == "half" || name == "float16") return DType::kFloat16;
  if (name == "i32" || name == "int32") return DType::kInt32;
  if (name == "i64" || name == "int64") return DType::kInt64;
  return DType::kFloat32;
}

absl::StatusOr<bench::RoutingSpec> RoutingOf(const Settings& settings, int ranks) {
  auto parsed = bench::ParseRouting(settings.text("routing"));
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--", parsed.status().message()));
  }
  bench::RoutingSpec routing = *std::move(parsed);
  if (routing.path.empty()) return routing;
  const auto file = MappedFile::Open(routing.path);
  MOE_RETURN_IF_ERROR(InputError("--routing", file.status()));
  MOE_RETURN_IF_ERROR(routing.kind == bench::RoutingSpec::kMatrix
                          ? ReadMatrix(TextOf(*file), ranks, routing)
                          : ReadTrace(TextOf(*file), ranks, routing));
  return routing;
}

absl::Status SetDispatch(const Settings& settings, int ranks, bench::CaseSpec& spec) {
  spec.dispatch = settings.is("dispatch", "direct")         ? DispatchAlgorithm::kDirect
                  : settings.is("dispatch", "hierarchical") ? DispatchAlgorithm::kHierarchical
                                                            : DispatchAlgorithm::kStaged;
  spec.node_size = settings.integer("node-size");
  if (spec.node_size < 0 || spec.node_size > ranks) {
    return WrongFlag("--node-size", settings.text("node-size"),
                     absl::StrCat("0 to the ", ranks, " ranks"));
  }
  if (spec.dispatch == DispatchAlgorithm::kHierarchical && spec.node_size > 0 &&
      ranks % spec.node_size != 0) {
    return WrongFlag("--node-size", settings.text("node-size"),
                     absl::StrCat("a divisor of the ", ranks, " ranks for hierarchical dispatch"));
  }
  return absl::OkStatus();
}

absl::Status SetRun(const Settings& settings, BenchRunOptions& run) {
  run.pin = settings.on("pin");
  run.quiet = settings.on("quiet");
  if (settings.real("comm-timeout") <= 0) {
    return WrongFlag("--comm-timeout", settings.text("comm-timeout"), "more than 0");
  }
  run.comm_timeout = absl::Seconds(settings.real("comm-timeout"));
  return absl::OkStatus();
}

absl::Status SetMeasure(const Settings& settings, bench::MeasureOptions& measure) {
  measure.iterations = settings.integer("iters");
  measure.warmup = settings.integer("warmup-iters");
  measure.max_noise_pct = settings.real("max-noise");
  measure.budget = absl::Seconds(settings.real("timeout"));
  measure.check = settings.is("check", "1") ? bench::Check::kYes : bench::Check::kNo;
  if (measure.iterations < 1 || measure.iterations > 1'000'000) {
    return WrongFlag("-n", settings.text("iters"), "1 to 1000000");
  }
  if (measure.warmup < 0) return WrongFlag("-w", settings.text("warmup-iters"), "at least 0");
  if (measure.max_noise_pct < 0) {
    return WrongFlag("--max-noise", settings.text("max-noise"), "0 or more");
  }
  if (settings.real("timeout") < 0) return WrongFlag("-T", settings.text("timeout"), "0 or more");
  return absl::OkStatus();
}

absl::Status SetOutput(const Settings& settings, const std::vector<std::string>& columns,
                       BenchOutputOptions& options) {
  options.form = bench::TableFormOf(settings.text("output"));  // "table": none of them
  options.form_err = bench::TableFormOf(settings.text("output-stderr"));
  options.json_path = settings.text("json-file");
  if (settings.empty("fail-if")) return absl::OkStatus();
  auto parsed = bench::FailIf::Parse(settings.text("fail-if"), columns);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("--fail-if is ", parsed.status().message()));
  }
  options.fail_if = *std::move(parsed);
  return absl::OkStatus();
}

absl::Status CheckOutputs(const Settings& settings, const bench::RoutingSpec& routing) {
  const std::vector<FlagPath> outputs = {{"-J", settings.text("json-file")},
                                         {"--trace", settings.text("trace")},
                                         {"--svg", settings.text("svg")}};
  MOE_RETURN_IF_ERROR(CheckOutputPaths(
      {{"--config", settings.text("config")}, {"--routing", routing.path}}, outputs));
  for (const FlagPath& output : outputs) {
    if (!output.path.empty()) MOE_RETURN_IF_ERROR(CheckWritable(output.flag, output.path));
  }
  return absl::OkStatus();
}

}  // namespace moe::cli
