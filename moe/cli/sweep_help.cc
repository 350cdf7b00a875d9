#include "moe/cli/command.h"
#include "moe/cli/sweep_settings.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe sweep [--measure layer|train] [flags with lists]

Measures every point of a cross product: expert count, top-k, capacity factor, expert-parallel size
and what else takes a list below. Of one layer speed and drops under a routing skew, or of training
runs on real text also loss and balance.

  moe sweep --num-experts 4-64*2 --topk 1,2 --routing zipf:1 --ranks 4
  moe sweep --measure train --data book.txt --steps 200 --capacity-factor none,1,1.25 -J rows.jsonl
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
Points come in the order of the nested loops, outermost first: router, ranks, ep, dispatch,
moe-overlap-degree, hidden-size, moe-ffn-hidden-size, dtype, tokens or micro-batch-size, routing,
num-experts, topk, capacity-factor. Bad values are refused before anything runs; values that do not
go together (topk above num-experts) make an error row, unless no point is possible.

Columns; means over the repetitions
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
  val loss   held-out text, nats per byte
  peak       largest rank's parameters, gradients, workspace; training: and optimiser
  *          no other point is better: val loss and tok/s; of layers drop% and tok/s

Memory is estimated before a point runs, for all ranks of this machine: parameters x (4 weight + 4
gradient + 8 optimiser bytes; bf16, f16 + 2, layout-invariant + 4) and 3/2 x the activations that
backward needs. More than --max-memory, or than was available at the start, is an error row.

-J appends a row when its point ends; what kills the sweep costs the point in flight. --resume takes
a row for a point if all settings that change results are the same, its text too. Error rows count
as done, but with --retry. Under mpirun a point that fails while it runs ends the job after its row
is written; --resume goes on behind it. Ctrl-C prints the rows so far and the command that goes on.

-o and -J have one row per point, keys as in docs/sweep.md. moe report FILE draws them.

Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-), then
--config, then defaults.

Exit codes: 0 ok, 1 a point is an error row, 2 usage or settings, 3 malformed --resume file, 4 a
write failed, 5 out of memory, 6 loss not finite (mpirun), 7 a rank failed, 8 timeout, 9 rendezvous,
10 no such backend.
)";

}  // namespace

CommandHelp SweepHelp() {
  return {.head = kHead, .settings = SweepSettings(), .tail = kTail};
}

}  // namespace moe::cli
