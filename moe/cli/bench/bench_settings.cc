// The flags of `moe bench`, which of them its operations read, and its help.
#include <algorithm>
#include <iterator>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>

#include "dispatch/dispatcher.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/bench/bench_options.h"
#include "moe/cli/measure/bench_row.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/layer_bench.h"

namespace moe::cli {
namespace {

// Groups of the settings of a layer, which collectives refuse.
constexpr char kLayerGroup[] = "A layer";
constexpr char kRouterGroup[] = "Router of a layer";

constexpr Choice<measure::Check> kChecks[] = {{"0", measure::Check::kNo},
                                              {"1", measure::Check::kYes}};

void AddTraffic(Table& t) {
  t.Group("Traffic and algorithms", kInRow);
  t.Add("--routing KIND",
        {Kind::kText,
         "uniform",
         {"uniform", "zipf:", "hot_expert:", "hot_rank:", "ragged", "zero_rank",
          "matrix:", "trace:"}},
        "of alltoallv and layer; see below");
  t.Add("--seed N", {Kind::kSeed, "0"}, "of drawn routings");
  t.Add("--dispatch NAME", {Kind::kWord, "staged", WordsOf(kDispatchWords)},
        "how all-to-alls travel: one exchange; peers' memory read in place; one rank per host");
  t.Add("--node-size N", {Kind::kInteger, "0"},
        "ranks that stand for one host; 0 = hosts are the real ones")
      .roles = 0;
  t.Add("--all-reduce NAME", {Kind::kWord, "auto", {"auto", "ring", "direct", "library"}},
        "library: MPI's or NCCL's; direct: peers' memory (local only); auto: the ring for its "
        "types, else what the backend has");
}

void AddMeasureSettings(measure::MeasureOptions& measure, Table& t) {
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

void AddLayerSettings(measure::LayerSpec& spec, Table& t) {
  t.Group(kLayerGroup);
  t.Add("--tokens, --tokens-per-rank T", &spec.tokens, "tokens of each rank")
      .Least(1)
      .Roles(kInLayerRow);
  spec.layer.router.num_experts = 0;
  AddShapeSettings(spec.layer, t);
  t.Add("--threads N", &spec.trainer.session.threads, "of each rank")
      .Most(kMostThreads)
      .Least(1)
      .Roles(kInRow | kPerRank);
  t.Add("--expert-model-parallel-size, --ep N", Kind::kInteger,
        "ranks that share one set of experts; ETP times EP divides the ranks; default: all")
      .Roles(kInLayerRow);
  t.Add("--tensor-model-parallel-size, --tp N", &spec.trainer.session.mesh.tensor,
        "ranks that share a shared expert's matrices, and the tokens of all of them; at most "
        "--tensor-leaves; divides EP times ETP")
      .Least(1)
      .Roles(kInLayerRow);
  t.Add("--expert-tensor-parallel-size, --etp N", &spec.trainer.session.mesh.expert_tensor,
        "ranks that share the matrices of experts; at most --tensor-leaves")
      .Least(1)
      .Roles(kInLayerRow);
  t.Add("--tensor-leaves S", {Kind::kWord, "1", {"1", "2", "4", "8", "16"}},
        "leaves of products that are balanced trees");
  t.Add("--moe-overlap-degree N", &spec.layer.overlap_degree,
        "chunks of a rank's experts, so that exchange and experts overlap")
      .Least(1)
      .Roles(kInLayerRow);
  t.Add("--numerics NAME", {&spec.trainer.session.numerics, kNumericsWords},
        "of gradients: layout-invariant, exact sums; fast, float32 sums")
      .Roles(kInLayerRow);
  AddBFloat16OrderSetting(spec.trainer.session.bfloat16_order, t);
  t.Add("--forward-only", &spec.forward_only,
        "no backward: forwards follow each other, as in programs that do not train");
  t.Add("--pack-weights", &spec.layer.pack_weights,
        "forward reads packed copies of the weights, as programs that do not train may: faster the "
        "fewer tokens an expert has; --device cpu");
  t.Group(kRouterGroup);
  AddRoutingSettings(spec.layer, t);
}

void AddRunSettings(BenchOptions& options, Table& t) {
  t.Group("Ranks");
  AddRankSettings(t);
  AddShareDeviceSetting(t);
  t.Add("--pin", &options.pin, "a core for each thread of a rank, round robin");
  AddTimeoutSetting(t);
}

void AddOutputSettings(BenchOptions& options, Table& t) {
  t.Group("Output", kInRow);
  AddFormSettings(t);
  AddTraceSetting("the timed calls", t);
  t.Add("--format NAME", {Kind::kWord, "table", {"table", "nccl"}},
        "of the table: nccl for nccl-tests' thirteen columns, out of place and in place");
  t.Add("-J, --json-file FILE", &options.json_path, "all rows as one JSON array").Roles(kPerRank);
  t.Add("--fail-if EXPR", Kind::kText, "exit 1 if it holds for a row");
  AddQuietSetting("no notes on standard error", t);
  AddConfigSetting("settings by name", t);
  AddHelpSettings(t);
}

constexpr char kHead[] =
    R"(usage: moe bench OPERATION [flags]

Times a collective over a range of sizes and checks every timed call, as nccl-tests do, on threads
of this process or, under mpirun, on processes. moe bench OPERATION --help is of that one alone.

  moe bench alltoall --ranks 4 -b 64K -e 16M -f 4
  moe bench alltoallv --routing zipf:1.2 --dispatch hierarchical --node-size 2
  mpirun -n 4 moe bench allreduce --all-reduce library -d bf16 --fail-if 'busbw<1.5'
)";

#define COLLECTIVES "alltoall alltoallv allreduce allgather reducescatter p2p memcpy"

// Which operations read flags that not all operations read. Other flags of a layer are read by
// `layer` alone.
constexpr struct {
  const char* flags;
  const char* operations;
} kReaders[] = {
    {"minbytes maxbytes stepfactor stepbytes format", COLLECTIVES},
    {"check", COLLECTIVES},
    {"routing seed num-experts", "alltoallv layer"},
    {"dispatch", "alltoall alltoallv layer"},
    {"node-size ranks backend share-device pin comm-timeout trace", COLLECTIVES " layer"},
    {"all-reduce", "allreduce"},
};

// Notes after the flags, in this order, with the operations that they apply to.
constexpr struct {
  const char* operations;
  const char* text;
} kTail[] = {
    {COLLECTIVES, R"(
Columns, for n ranks; GB = 1e9 bytes
  size     bytes of a rank, its own part included; skewed: max over ranks of max(sent, received)
  count    elements: of one block; allreduce, alltoallv, p2p: of size
  time     max over ranks of the mean over calls; each call starts at a barrier
  algbw    size / time
  busbw    algbw (n-1)/n; allreduce: algbw 2(n-1)/n; p2p, memcpy: algbw
  #wrong   elements that differ from the exact result, over all ranks and timed calls
  i_min i_max i_p50 i_p99 i_cv%   of the calls' times, each its slowest rank's; cv = deviation/mean
  imb_tx imb_rx   max / mean over ranks of the bytes sent and received; @: the busiest rank
  wait%    100 x sum w / sum t: t = leave - enter of a rank's call, w = min(A, leave) - enter for
           the last rank to enter at A: late entry, and not waits for a busier rank
  slow     the rank that starts and ends last; not the busiest; -: none beyond noise
  %memcpy  of the fastest memcpy of what each rank receives, all at once, between the calls
)"},
    {COLLECTIVES, R"(
--device cuda --backend nccl: collectives in the memory of GPUs, one a rank
)"},
    {"layer", R"(
layer: T tokens a rank, experts over all ranks (--ep: over groups); phases of the slowest rank,
medians; share: mean over ranks of phase / pass; experts do 6 H F operations forward, 12 backward,
for every row. #wrong counts results that differ from the first call's. Without --routing the router
decides, on random tokens; with it tokens are given experts, and capacity drops what is over.
--device cuda: the same on a GPU, by the host's clock.
)"},
    {"alltoallv layer", R"(
--routing: destinations (alltoallv, in tokens: a 4096th of a rank's elements) or experts (layer),
drawn with --seed; of a token's K experts without replacement
  uniform       the same for every pair, or expert
  zipf:S        expert e of E with probability ~ 1/(e+1)^S; experts in blocks on ranks
  hot_expert:P  expert 0 with probability P, the others evenly
  hot_rank:P    the same of ranks
  ragged        ranks have 0 to all of their tokens; zero_rank: the last rank has none
  matrix:FILE   n lines of n shares: line s, column d is what rank s has for rank d (alltoallv)
  trace:FILE    what moe train --record-routing wrote, a record a call; recorded on n ranks or a
                multiple, whose neighbours merge. alltoallv: slots x H elements of its type; -b, -e:
                scaled so that the largest record has that size
--num-experts 0 is 8 a rank.
)"},
    {COLLECTIVES " layer", R"(
-o and -J have one row per line of the table, keys as in docs/bench.md. --fail-if compares columns
(busbw, algbw, time, p50, p99, cv, wait, imb_rx, memcpy, wrong, any number of -o json) with numbers:
< <= > >= == !=, &&, ||, parentheses; it fails if a row satisfies it.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -), then defaults.

Exit codes: 0 ok, 1 wrong elements or --fail-if, 2 usage, 3 malformed matrix or trace, 4 a write
failed, 5 out of memory, 7 a rank failed, 8 timeout, 9 rendezvous, 10 no such backend.
)"},
};

// The operations in the order of the help, each with an example of its flags.
constexpr struct Operation {
  const char* name;
  const char* help;
  const char* example;
} kOperations[] = {
    {"alltoall", "equal blocks between all ranks", "--ranks 4 -b 64K -e 16M -f 4"},
    {"alltoallv", "the blocks of --routing: even, skewed, ragged",
     "--routing zipf:1.2 --dispatch hierarchical --node-size 2"},
    {"allreduce", "sum, in place, by --all-reduce",
     "--ranks 4 --all-reduce direct -d bf16 --fail-if 'busbw<1.5'"},
    {"allgather", "every rank's block to all ranks", "--ranks 4 -d bf16"},
    {"reducescatter", "sum, each rank keeps its block", "--ranks 4 -d i64"},
    {"p2p", "one pair at a time, every pair: a table in GB/s", "--ranks 4 -b 1M -e 1M"},
    {"memcpy", "every rank copies its own bytes at the same time: this machine's limit",
     "--ranks 2 -b 1M -e 256M"},
    {"layer", "a whole MoE layer, forward and backward, by phase",
     "--ranks 4 --routing zipf:1.2 --capacity-factor 1.25"},
};

// Whether `word` is one of the blank-separated words.
bool Lists(absl::string_view words, absl::string_view word) {
  const std::vector<absl::string_view> list = absl::StrSplit(words, ' ');
  return std::find(list.begin(), list.end(), word) != list.end();
}

// For one operation; for all if it is empty.
std::string TailOf(absl::string_view operation) {
  std::string tail;
  for (const auto& [operations, text] : kTail) {
    if (operation.empty() || Lists(operations, operation)) tail += text;
  }
  return tail;
}

}  // namespace

Table BenchSettings(BenchOptions& options) {
  Table table;
  AddMeasureSettings(options.measure, table);
  AddTraffic(table);
  AddLayerSettings(options.layer, table);
  AddRunSettings(options, table);
  AddOutputSettings(options, table);
  return table;
}

std::string BenchIdentity(const Settings& settings, const std::string& operation) {
  const uint32_t in_row = operation == "layer" ? kInRow | kInLayerRow : kInRow;
  const std::string flags = FlagsOf(settings, [&](const Setting& s) { return s.is(in_row); });
  return std::string(absl::StripLeadingAsciiWhitespace(flags));
}

std::vector<Operands::Word> BenchOperations() {
  std::vector<Operands::Word> words;
  for (const Operation& operation : kOperations) words.push_back({operation.name, operation.help});
  return words;
}

bool Reads(absl::string_view operation, const Setting& setting) {
  for (const auto& [flags, readers] : kReaders) {
    if (Lists(flags, setting.name)) return Lists(readers, operation);
  }
  const bool of_layer = setting.group == kLayerGroup || setting.group == kRouterGroup;
  return !of_layer || operation == "layer";
}

CommandHelp BenchHelp() {
  BenchOptions defaults;
  return {.head = kHead,
          .operands = Operands{.heading = "Operations", .words = BenchOperations()},
          .settings = BenchSettings(defaults).rows(),
          .tail = TailOf("")};
}

CommandHelp BenchHelp(absl::string_view operation) {
  if (operation.empty()) return BenchHelp();
  const auto* const row = std::find_if(std::begin(kOperations), std::end(kOperations),
                                       [&](const Operation& o) { return o.name == operation; });
  CommandHelp help = {
      .head = absl::StrCat("usage: moe bench ", operation, " [flags]\n\n", row->help,
                           "\n\n  moe bench ", operation, " ", row->example, "\n"),
      .tail = TailOf(operation)};
  BenchOptions defaults;
  for (const Setting& setting : BenchSettings(defaults).rows()) {
    if (Reads(operation, setting)) help.settings.push_back(setting);
  }
  return help;
}

}  // namespace moe::cli
