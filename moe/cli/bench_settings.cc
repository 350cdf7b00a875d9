#include "moe/cli/bench_settings.h"

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "moe/bench/bench_row.h"
#include "moe/bench/collectives.h"
#include "moe/bench/layer_bench.h"
#include "moe/cli/command.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/trace_file.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe bench OPERATION [flags]

Times a collective over a range of sizes and checks every timed call, as nccl-tests do, on threads
of this process or, under mpirun, on processes.

  moe bench alltoall --ranks 4 -b 64K -e 16M -f 4
  moe bench alltoallv --routing zipf:1.2 --dispatch hierarchical --node-size 2
  mpirun -n 4 moe bench allreduce --all-reduce library -d bf16 --fail-if 'busbw<1.5'
)";

constexpr char kTail[] =
    R"(
Columns, for n ranks; GB = 1e9 bytes
  size     bytes of a rank, its own part included; skewed: max over ranks of max(sent, received)
  count    elements: of one block; allreduce, alltoallv, p2p: of size
  time     max over ranks of the mean over calls; each call starts at a barrier
  algbw    size / time
  busbw    algbw (n-1)/n; allreduce: algbw 2(n-1)/n; p2p, memcpy: algbw
  #wrong   elements that differ from the exact result, over all ranks and timed calls
  i_min i_max i_p99 i_cv%   of the calls' times, each its slowest rank's; cv = deviation / mean
  imb_tx imb_rx   max / mean over ranks of the bytes sent and received
  wait%    100 x sum w / sum t: t = leave - enter of a rank's call, w = min(A, leave) - enter for
           the last rank to enter at A: time that no algorithm could have used
  slow     the rank for which the mean of enter + leave is the largest
  %memcpy  100 x algbw / GB/s of memcpy of the same size, timed between the calls

One rank's kernels; time is the median over calls, and what they are measured against is measured on
the same threads just before each call
  gemm     y = x W^T, dx = dy W, dW = dy^T x for rows grouped by expert; 2 N H F operations each, N
           = T K rows; %peak: of a loop of multiply-adds in registers
  gate     logits to slots, weights and counts, and back, by --router; without the product that
           makes the logits and without capacity
  permute  tokens gathered to rows by expert; backward: the sum of a token's rows
  combine  rows home, weighted, in choice order; backward: rows scaled, gradient of the weights
  size, GB/s   every byte of the arguments and of the result once (docs/bench.md has the sums)
  copy, %copy  of a memcpy that reads and writes as many bytes in all
  #wrong       differ from results computed apart; blank: gates with a rule of their own
--device cuda: the same on a GPU; timed by its events (layer: by the host's clock), with cold
caches; limits are a copy of the device and a dense product of cuBLAS. gate then has two more
kernels: select (ids, weights and counts alone; -d bf16, f16 too) and plan (slots sorted by expert)
--device cuda --backend nccl: collectives in the memory of GPUs, one a rank

layer: T tokens a rank, experts over all ranks (--ep: over groups); phases of the slowest rank,
medians; share: mean over ranks of phase / pass; experts do 6 H F operations forward, 12 backward,
for every row. #wrong counts results that differ from the first call's. Without --routing the router
decides, on random tokens; with it tokens are given experts, and capacity drops what is over.

--routing: destinations (alltoallv, in tokens: a 4096th of a rank's elements) or experts (gate,
permute, combine, gemm, layer), drawn with --seed; of a token's K experts without replacement
  uniform       the same for every pair, or expert
  zipf:S        expert e of E with probability ~ 1/(e+1)^S; experts in blocks on ranks
  hot_expert:P  expert 0 with probability P, the others evenly
  hot_rank:P    the same of ranks (alltoallv, layer)
  ragged        ranks have 0 to all of their tokens; zero_rank: the last rank has none (likewise)
  matrix:FILE   n lines of n shares: line s, column d is what rank s has for rank d (alltoallv)
  trace:FILE    what moe train --record-routing wrote, a record a call; recorded on n ranks or a
                multiple, whose neighbours merge. alltoallv: slots x H elements of its type; -b, -e:
                scaled so that the largest record has that size
--num-experts 0 is 8 a rank (alltoallv, layer) or 8.

-o and -J have one row per line of the table, keys as in docs/bench.md. --fail-if compares columns
(busbw, algbw, time, p50, p99, cv, wait, imb_rx, memcpy, wrong, any number of -o json) with numbers:
< <= > >= == !=, &&, ||, parentheses; it fails if a row satisfies it.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -), then defaults.

Exit codes: 0 ok, 1 wrong elements or --fail-if, 2 usage, 3 malformed matrix or trace, 4 a write
failed, 5 out of memory, 7 a rank failed, 8 timeout, 9 rendezvous, 10 no such backend.
)";

using Table = std::vector<Setting>;

template <typename T>
std::string Text(T value) {
  return absl::StrCat(value);
}

void AddSizes(Table& table) {
  const char* const kGroup = "Sizes and calls (nccl-tests' letters)";
  const bench::MeasureOptions d;
  table.insert(
      table.end(),
      {{kGroup, "minbytes", "", 'b', Kind::kText, "BYTES", "64K",
        "smallest size; K, M, G = 1024^i"},
       {kGroup, "maxbytes", "", 'e', Kind::kText, "BYTES", "16M", "largest size"},
       {kGroup, "stepfactor", "", 'f', Kind::kInteger, "N", "4", "between sizes"},
       {kGroup, "stepbytes", "", 'i', Kind::kText, "BYTES", "", "between sizes, instead of -f"},
       {kGroup, "iters", "", 'n', Kind::kInteger, "N", Text(d.iterations), "timed calls, at least"},
       {kGroup, "warmup-iters", "", 'w', Kind::kInteger, "N", Text(d.warmup), "calls before them"},
       {kGroup, "max-noise", "", 0, Kind::kReal, "PERCENT", Text(d.max_noise_pct),
        "calls go on, doubling, until i_cv% is at most this"},
       {kGroup,
        "timeout",
        "",
        'T',
        Kind::kReal,
        "SECONDS",
        "1",
        "... or until a size has taken this long; 0: exactly -n calls",
        {},
        false,
        kMostSeconds},
       {kGroup,
        "check",
        "",
        'c',
        Kind::kWord,
        "0|1",
        "1",
        "count wrong elements of every timed call",
        {"0", "1"}},
       {kGroup,
        "datatype",
        "dtype",
        'd',
        Kind::kWord,
        "TYPE",
        "f32",
        "of the elements; the ring sums f32 and i64",
        {"f32", "f64", "bf16", "f16", "i32", "i64", "float", "double", "bfloat16", "half",
         "float16", "int32", "int64"}}});
}

void AddTraffic(Table& table) {
  const char* const kGroup = "Traffic and algorithms";
  table.insert(
      table.end(),
      {{kGroup,
        "routing",
        "",
        0,
        Kind::kText,
        "KIND",
        "uniform",
        "of alltoallv, and of a layer and its parts; see below",
        {"uniform", "zipf:", "hot_expert:", "hot_rank:", "ragged", "zero_rank",
         "matrix:", "trace:"}},
       {kGroup, "seed", "", 0, Kind::kSeed, "N", "0", "of drawn routings"},
       {kGroup,
        "dispatch",
        "",
        0,
        Kind::kWord,
        "NAME",
        "staged",
        "how all-to-alls travel: one exchange; peers' memory read in place; one rank per host",
        {"staged", "direct", "hierarchical"}},
       {kGroup, "node-size", "", 0, Kind::kInteger, "N", "0",
        "ranks that stand for one host; 0 = all, and hosts are the real ones"},
       {kGroup,
        "all-reduce",
        "",
        0,
        Kind::kWord,
        "NAME",
        "auto",
        "library: MPI's or NCCL's; direct: peers' memory (local only); auto: the ring for its "
        "types, else what the backend has",
        {"auto", "ring", "direct", "library"}}});
}

void AddLayer(Table& table) {
  const bench::LayerSpec d;
  const LayerDefaults defaults = {.num_experts = 0,
                                  .hidden_size = d.layer.router.hidden_size,
                                  .ffn_hidden_size = d.layer.ffn_hidden_size,
                                  .aux_loss_coeff = 0};
  table.push_back({kLayerGroup, "tokens", "", 0, Kind::kInteger, "T", Text(d.tokens),
                   "tokens; layer: of each rank"});
  AddShapeSettings(kLayerGroup, defaults, table);
  table.insert(
      table.end(),
      {{kLayerGroup,
        "threads",
        "",
        0,
        Kind::kInteger,
        "N",
        "1",
        "of each rank",
        {},
        false,
        kMostThreads},
       {kLayerGroup, "expert-model-parallel-size", "ep", 0, Kind::kInteger, "N", "",
        "ranks that share one set of experts; divides the ranks; default: all"},
       {kLayerGroup, "moe-overlap-degree", "", 0, Kind::kInteger, "N", Text(d.layer.overlap_degree),
        "chunks of a rank's experts, so that exchange and experts overlap"},
       {kLayerGroup, "pack-weights", "", 0, Kind::kSwitch, "", "",
        "forward reads packed copies of the weights, as programs that do not train may: faster the "
        "fewer tokens an expert has; --device cpu"}});
  AddRoutingSettings(kRouterGroup, defaults, table);
}

void AddOutput(Table& table) {
  const char* const kGroup = "Output";
  AddTraceSetting(kGroup, "the timed calls", table);
  table.insert(
      table.end(),
      {{kGroup,
        "format",
        "",
        0,
        Kind::kWord,
        "NAME",
        "table",
        "of the table: nccl for nccl-tests' thirteen columns, N/A where a call has no in-place or "
        "out-of-place form",
        {"table", "nccl"}},
       {kGroup, "json-file", "", 'J', Kind::kText, "FILE", "", "all rows as one JSON array"},
       {kGroup, "svg", "", 0, Kind::kText, "FILE", "", "p2p: the table of the largest size"},
       {kGroup, "fail-if", "", 0, Kind::kText, "EXPR", "", "exit 1 if it holds for a row"},
       {kGroup, "quiet", "", 'q', Kind::kSwitch, "", "", "no notes on standard error"}});
  AddConfigSetting(kGroup, "settings by name", table);
}

}  // namespace

const std::vector<Operands::Word>& BenchOperations() {
  static const std::vector<Operands::Word> operations = {
      {"alltoall", "equal blocks between all ranks"},
      {"alltoallv", "the blocks of --routing: even, skewed, ragged"},
      {"allreduce", "sum, in place, by --all-reduce"},
      {"allgather", "every rank's block to all ranks"},
      {"reducescatter", "sum, each rank keeps its block"},
      {"p2p", "one pair at a time, every pair: a table in GB/s"},
      {"memcpy", "every rank copies its own bytes at the same time: this machine's limit"},
      {"gate", "one rank's kernels: logits to slots and weights"},
      {"permute", "... tokens to rows grouped by expert"},
      {"combine", "... rows to tokens, weighted"},
      {"gemm", "... the grouped products of experts"},
      {"layer", "a whole MoE layer, forward and backward, by phase"},
  };
  return operations;
}

std::vector<Setting> BenchSettings() {
  Table table;
  AddSizes(table);
  AddTraffic(table);
  AddLayer(table);
  AddRankSettings("Ranks", table);
  AddShareDeviceSetting("Ranks", table);
  table.push_back({"Ranks", "pin", "", 0, Kind::kSwitch, "", "",
                   "a core for each thread of a rank, round robin"});
  AddTimeoutSetting("Ranks", table);
  AddFormSettings("Output", table);
  AddOutput(table);
  AddHelpSettings("Output", table);
  return table;
}

std::string BenchIdentity(const Settings& settings, const std::string& operation) {
  std::vector<std::string> skip = {
      "minbytes",  "maxbytes",     "stepfactor", "stepbytes",  "iters",     "warmup-iters",
      "max-noise", "timeout",      "check",      "datatype",   "routing",   "seed",
      "dispatch",  "threads",      "ranks",      "all-reduce", "backend",   "device",
      "output",    "comm-timeout", "trace",      "format",     "json-file", "svg",
      "fail-if",   "quiet",        "config",     "verbose",    "color",     "output-stderr"};
  if (!bench::OpOf(operation).has_value()) {
    skip.insert(skip.end(), {"tokens", "hidden-size", "num-experts", "moe-ffn-hidden-size",
                             "moe-router-topk", "router"});
  }
  if (operation == "layer") {
    skip.insert(skip.end(),
                {"expert-model-parallel-size", "moe-overlap-degree", "moe-expert-capacity-factor"});
  }
  return std::string(absl::StripLeadingAsciiWhitespace(FlagsOf(settings, skip)));
}

CommandHelp BenchHelp() {
  return {.head = kHead,
          .operands = Operands{.heading = "Operations", .words = BenchOperations()},
          .settings = BenchSettings(),
          .tail = kTail};
}

}  // namespace moe::cli
