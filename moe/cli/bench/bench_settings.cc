#include <absl/strings/ascii.h>

#include "moe/cli/base/choices.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/bench/bench_options.h"
#include "moe/cli/bench/bench_row.h"
#include "moe/cli/bench/collectives.h"
#include "moe/cli/bench/layer_bench.h"

namespace moe::cli {
namespace {

constexpr Choice<bench::Check> kChecks[] = {{"0", bench::Check::kNo}, {"1", bench::Check::kYes}};

void AddTraffic(Table& t) {
  t.Group("Traffic and algorithms", kInRow);
  t.Add("--routing KIND",
        {Kind::kText,
         "uniform",
         {"uniform", "zipf:", "hot_expert:", "hot_rank:", "ragged", "zero_rank",
          "matrix:", "trace:"}},
        "of alltoallv, and of a layer and its parts; see below");
  t.Add("--seed N", {Kind::kSeed, "0"}, "of drawn routings");
  t.Add("--dispatch NAME", {Kind::kWord, "staged", WordsOf(kDispatches)},
        "how all-to-alls travel: one exchange; peers' memory read in place; one rank per host");
  t.Add("--node-size N", {Kind::kInteger, "0"},
        "ranks that stand for one host; 0 = all, and hosts are the real ones")
      .roles = 0;
  t.Add("--all-reduce NAME", {Kind::kWord, "auto", {"auto", "ring", "direct", "library"}},
        "library: MPI's or NCCL's; direct: peers' memory (local only); auto: the ring for its "
        "types, else what the backend has");
}

void AddMeasureSettings(bench::MeasureOptions& measure, Table& t) {
  t.Group("Sizes and calls (nccl-tests' letters)", kInRow);
  t.Add("-b, --minbytes BYTES", {Kind::kText, "64K"}, "smallest size; K, M, G = 1024^i");
  t.Add("-e, --maxbytes BYTES", {Kind::kText, "16M"}, "largest size");
  t.Add("-f, --stepfactor N", {Kind::kInteger, "4"}, "between sizes");
  t.Add("-i, --stepbytes BYTES", Kind::kText, "between sizes, instead of -f");
  t.Add("-n, --iters N", &measure.iterations, "timed calls, at least")
      .Within(1, 1'000'000, "1 to 1000000")
      .ByLetter();
  t.Add("-w, --warmup-iters N", &measure.warmup, "calls before them").Least(0).ByLetter();
  t.Add("--max-noise PERCENT", &measure.max_noise_pct,
        "calls go on, doubling, until i_cv% is at most this")
      .Least(0);
  t.Add("-T, --timeout SECONDS", &measure.budget,
        "... or until a size has taken this long; 0: exactly -n calls")
      .Most(kMostSeconds)
      .Least(0)
      .ByLetter();
  t.Add("-c, --check 0|1", {&measure.check, kChecks}, "count wrong elements of every timed call");
  t.Add("-d, --datatype, --dtype TYPE", {Kind::kWord, "f32", WordsOf(kDataTypes)},
        "of the elements; the ring sums f32 and i64");
}

void AddLayerSettings(bench::LayerSpec& spec, Table& t) {
  t.Group(kLayerGroup);
  t.Add("--tokens T", &spec.tokens, "tokens; layer: of each rank").Least(1).Roles(kInPartRow);
  spec.layer.router.num_experts = 0;
  AddShapeSettings(spec.layer, t);
  t.Add("--threads N", &spec.threads, "of each rank").Most(kMostThreads).Least(1).Roles(kInRow);
  t.Add("--expert-model-parallel-size, --ep N", Kind::kInteger,
        "ranks that share one set of experts; divides the ranks; default: all")
      .Roles(kInLayerRow);
  t.Add("--moe-overlap-degree N", &spec.layer.overlap_degree,
        "chunks of a rank's experts, so that exchange and experts overlap")
      .Least(1)
      .Roles(kInLayerRow);
  t.Add("--pack-weights", &spec.layer.pack_weights,
        "forward reads packed copies of the weights, as programs that do not train may: faster the "
        "fewer tokens an expert has; --device cpu");
  t.Add("--cuda-graph", &spec.layer.cuda_graph,
        "layer: its passes are captured as CUDA graphs and replayed; needs --device cuda, --ep 1 "
        "and --moe-pad-expert-input-to-capacity")
      .Field("cuda_graph");
  t.Group(kRouterGroup);
  AddRoutingSettings(spec.layer, t);
}

void AddRunSettings(BenchOptions& options, Table& t) {
  t.Group("Ranks");
  AddRankSettings(t);
  AddShareDeviceSetting(t);
  t.Add("--pin", &options.pin, "a core for each thread of a rank, round robin");
  AddTimeoutSetting(options.comm_timeout, t);
}

void AddOutputSettings(BenchOptions& options, Table& t) {
  t.Group("Output", kInRow);
  AddFormSettings(t);
  AddTraceSetting("the timed calls", t);
  t.Add("--format NAME", {Kind::kWord, "table", {"table", "nccl"}},
        "of the table: nccl for nccl-tests' thirteen columns, out of place and in place");
  t.Add("-J, --json-file FILE", &options.json_path, "all rows as one JSON array");
  t.Add("--svg FILE", Kind::kText, "p2p: the table of the largest size");
  t.Add("--fail-if EXPR", Kind::kText, "exit 1 if it holds for a row");
  AddQuietSetting("no notes on standard error", t);
  AddConfigSetting("settings by name", t);
  AddHelpSettings(t);
}

}  // namespace

Table BenchSettings(BenchOptions& options) {
  Table table;
  AddMeasureSettings(options.measure, table);
  AddTraffic(table);
  AddLayerSettings(options.part, table);
  AddRunSettings(options, table);
  AddOutputSettings(options, table);
  return table;
}

std::string BenchIdentity(const Settings& settings, const std::string& operation) {
  uint32_t in_row = kInRow;
  if (!bench::OpOf(operation).has_value()) in_row |= kInPartRow;
  if (operation == "layer") in_row |= kInLayerRow;
  const std::string flags = FlagsOf(settings, [&](const Setting& s) { return s.is(in_row); });
  return std::string(absl::StripLeadingAsciiWhitespace(flags));
}

}  // namespace moe::cli
