#include <algorithm>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/sweep/sweep_plan.h"

namespace moe::cli {
namespace {

using sweep::AxisKind;

constexpr char kHead[] =
    R"(usage: moe sweep [--measure layer|train] [flags with lists]

Measures every point of a cross product: expert count, top-k, capacity factor, expert-parallel size
and what else takes a list below. Of one layer speed and drops under a routing skew, or of training
runs on real text also loss and balance.

  moe sweep --num-experts 4-64*2 --topk 1,2 --routing zipf:1 --ranks 4
  moe sweep --measure train --data book.txt --steps 200 --capacity-factor none,1,1.25 -J rows.jsonl
  moe sweep --measure train --tokens corpus --vocab-size 50304 --num-experts 8,64 --ranks 2
  mpirun -n 4 moe sweep --measure train --data book.txt --ep 1,2,4 --resume rows.jsonl
)";

constexpr char kTail[] =
    R"(
Axes: flags whose value ends with ",..." take a comma list of values and ranges.
  4,8,16            these values, in this order
  1-4               1, 2, 3, 4
  256-1024+256      256, 512, 768, 1024
  4-64*2            4, 8, 16, 32, 64
  none,1-2+0.25     none, 1, 1.25, 1.5, 1.75, 2
Lists are crossed; --with between two of them couples them instead: --num-experts 8,16,64 --with
--topk 1,2,2 is three points. Coupled lists have as many values; a value may stand more than once.
Points come in the order of the nested loops, outermost first: router, ranks, pp, tp, etp, ep,
dispatch, moe-overlap-degree, hidden-size, moe-ffn-hidden-size, dtype, tokens-per-rank or
micro-batch-size, routing, num-experts, topk, capacity-factor. Bad values are refused before
anything runs; values that do not go together (topk above num-experts) make an error row, unless no
point is possible.

Columns; means over the repetitions
  dp         copies of every expert: ranks / pp / etp / ep
  tok/rank   tokens of a step / ranks
  params     over all experts / used by one token
  tok/s      tokens of all ranks / time; +- standard deviation over repetitions (n - 1). training:
             without the first step. layer: forward + backward, mean over calls of the slowest rank
  step       training: mean step. layer: forward + backward, median over calls of the slowest rank
  a2a        dispatch + combine, expert: mean over ranks; ar: gradient all-reduce, which overlaps
             backward; (% of step)
  drop%      slots over capacity / slots: first step -> mean of the last tenth of the steps
  MaxVio     (largest expert load - mean load) / mean load, of the worst layer; end of training
  dead       experts without a token, over all layers; end of training
  val loss   held-out text, nats per byte (with --tokens, per token)
  peak       largest rank's parameters, gradients, workspace; training: and optimiser
  *          no other point is better by more than the noise (docs/sweep.md): val loss and tok/s; of
             layers drop% and tok/s

Memory is estimated before a point runs, for all ranks of this machine: parameters x (4 weight + 4
gradient + 8 optimiser bytes; bf16, f16 + 2, layout-invariant + 4) and 3/2 x the activations that
backward needs. More than --max-memory, or than was available at the start, is an error row.

-J appends a row when its point ends; what kills the sweep costs the point in flight. --resume takes
a row for a point if all settings that change results are the same, its text too; a file with rows
of another build is refused. Error rows count as done, but with --retry. Under mpirun a point that
fails while it runs ends the job after its row is written; --resume goes on behind it. Ctrl-C prints
the rows so far and the command that goes on.

-o and -J have one row per point, keys as in docs/sweep.md. moe report FILE draws them.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-), then
--config, then defaults.

Exit codes: 0 ok, 1 a point is an error row, 2 usage or settings, 3 malformed --resume file, 4 a
write failed, 5 out of memory, 6 loss not finite (mpirun), 7 a rank failed, 8 timeout, 9 rendezvous,
10 no such backend.
)";
bool IsAxis(absl::string_view name) {
  const auto axes = SweepAxes();
  return std::any_of(axes.begin(), axes.end(),
                     [&](const SweepAxis& axis) { return axis.name == name; });
}

void AddSweep(Table& t) {
  t.Group("Sweep");
  t.Add("--measure WHAT", {Kind::kWord, "layer", {"layer", "train"}},
        "layer: one layer, forward and backward, on random tokens; train: every point is trained "
        "for --steps on --data or --tokens");
  t.Add("-r, --repetitions N|auto", {Kind::kInteger, "auto", {"auto"}},
        "of every point, with seeds seed, seed + 1, ...; auto: 5 of a layer, 1 of training");
  t.Add("--interleave", Kind::kSwitch,
        "the first repetition of every point, then the second of every point, ...: what drifts on "
        "the machine shows in the standard deviation; rows come with the last repetition");
  t.Add("--with FLAG:FLAG", Kind::kPaths,
        "two lists go together, the first values, then the second, ...; --with alone between two "
        "flags couples these: --num-experts 8,64 --with --topk 1,2");
  t.Add("-J, --out FILE", Kind::kText,
        "JSON lines, a row as soon as its point ends; a file that holds rows is refused")
      .Roles(kPerRank);
  t.Add("--resume FILE", Kind::kText,
        "such a file: its points are not measured again, the others are appended")
      .Roles(kPerRank);
  t.Add("--retry", Kind::kSwitch, "with --resume: measure points whose row is an error again");
  t.Add("--predict K", {Kind::kInteger, "0"},
        "with --measure train: K points are measured, spread over the sweep, those of --resume "
        "among them; the others have the status predicted, and are in no file; 0 = all are "
        "measured (docs/sweep.md)")
      .Least(0);
  t.Add("--max-memory MiB", Kind::kReal,
        "of all ranks of this machine; a point estimated above it becomes an error row, as one "
        "above the memory that is available")
      .Roles(kPerRank);
}

void AddOutput(Table& t) {
  t.Group("Output");
  AddFormSettings(t);
  AddQuietSetting("no progress, only errors and the table", t);
  AddConfigSetting("settings by name; axes as texts: \"num_experts\": \"4,8\"", t);
  AddHelpSettings(t);
}

}  // namespace

void AddLayerMeasure(measure::LayerSpec& layer, measure::MeasureOptions& measure, Table& t) {
  t.Group("Measuring a layer (--measure layer)", kNotTrained);
  t.Add("--tokens-per-rank T", &layer.tokens, "tokens of each rank; --tokens T, too");
  t.Add("--routing KIND", Kind::kText,
        "gives tokens their experts in place of the gate: uniform, zipf:S, hot_expert:P, "
        "hot_rank:P, ragged, zero_rank (moe bench --help); default: the gate, on random tokens");
  t.Add("-n, --iters N", &measure.iterations, "timed calls, at least").Least(1);
  t.Add("-w, --warmup-iters N", &measure.warmup, "calls before them").Least(0);
  t.Add("--max-noise PERCENT", &measure.max_noise_pct,
        "calls go on, doubling, until their deviation is at most this share of their mean")
      .Least(0);
  t.Add("-T, --timeout SECONDS", &measure.budget,
        "... or until a repetition has taken this long; 0: exactly -n calls")
      .Most(kMostSeconds)
      .Least(0);
}

absl::Span<const SweepAxis> SweepAxes() {
  static const SweepAxis axes[] = {
      {"router", "router", {.kind = AxisKind::kText}},
      {"ranks", "R", {}},
      {"pipeline-model-parallel-size", "pp", {}},
      {"tensor-model-parallel-size", "tp", {}},
      {"expert-tensor-parallel-size", "etp", {}},
      {"expert-model-parallel-size", "ep", {}},
      {"dispatch", "dispatch", {.kind = AxisKind::kText}},
      {"moe-overlap-degree", "d", {}},
      {"hidden-size", "H", {}},
      {"moe-ffn-hidden-size", "F", {}},
      {"dtype", "dtype", {.kind = AxisKind::kText}},
      {kTokensPerRank, "T", {}},
      {"micro-batch-size", "mbs", {}},
      {"routing", "routing", {.kind = AxisKind::kText}},
      {"num-experts", "E", {}},
      {"moe-router-topk", "k", {}},
      {"moe-expert-capacity-factor",
       "cf",
       {.kind = AxisKind::kReal, .words = {"none"}, .least = 0, .above = true}}};
  return axes;
}

const Table& PointSettings() {
  static const Table table = [] {
    Table rows;
    for (Setting s : TrainSettings().rows()) {
      // The default for a layer differs: all ranks share the experts.
      if (s.name == "expert-model-parallel-size") {
        s.help =
            "EP: ranks that share one set of experts; divides R / PP; default of a layer "
            "R / ETP";
        s.words.clear();  // an axis has numbers
      }
      rows.Add(s);
    }
    measure::LayerSpec layer;
    measure::MeasureOptions measure;
    AddLayerMeasure(layer, measure, rows);
    return rows.Unbound();
  }();
  return table;
}

bool ChangesResults(Measure measure, const Setting& setting) {
  if (setting.is(kOfOneRun | kPlacement)) return false;
  return measure == Measure::kTrain ? !setting.is(kNotTrained) : setting.is(kOfLayer | kNotTrained);
}

bool IsOfOther(Measure measure, const Setting& setting) {
  return !ChangesResults(measure, setting) &&
         ChangesResults(measure == Measure::kLayer ? Measure::kTrain : Measure::kLayer, setting);
}

Table SweepSettings() {
  Table table;
  AddSweep(table);
  for (Setting s : PointSettings().rows()) {
    if (s.is(kOfOneRun)) continue;
    if (IsAxis(s.name)) {
      if (s.kind == Kind::kWord) absl::StrAppend(&s.help, " (", absl::StrJoin(s.words, " | "), ")");
      s.kind = Kind::kText;
      s.words.clear();
      absl::StrAppend(&s.value_name, ",...");
    }
    table.Add(s);
  }
  AddOutput(table);
  return table;
}

CommandHelp SweepHelp() {
  return {.head = kHead, .settings = SweepSettings().rows(), .tail = kTail};
}

}  // namespace moe::cli
