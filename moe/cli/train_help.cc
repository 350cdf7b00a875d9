#include "moe/cli/command.h"
#include "moe/cli/train_settings.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe train --data PATH [flags]

Trains a byte-level mixture-of-experts language model on text files, expert-parallel x
data-parallel, on threads of this process or, under mpirun, on processes. Every 20th block of
16 KiB of the text is held out and measured before and after.

  moe train --data /usr/share/games/fortunes --ranks 4 --ep 2 --num-experts 8 --topk 2
  mpirun -n 4 moe train --data book.txt --ep 4 --out run
)";

constexpr char kTail[] =
    R"(
Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-;
MOE_DATA splits at ':'), then --config, then defaults.

Progress and results
  tok/s    tokens of a step / time of its slowest rank
  a2a      dispatch + combine: time in exchanges, mean over ranks
  ar       gradient all-reduce, which overlaps backward
  drop     slots over capacity / slots; a slot is one (token, choice)
  maxvio   (largest expert load - mean load) / mean load, of the worst layer
  dead     experts without a token in the step, over all layers
  aux      balance loss with its coefficient, summed over layers
  gnorm    2-norm of the gradient before clipping
  bits per byte = loss in nats / ln 2
  communication, at the end: bytes that left a rank / seconds of dispatch + combine, and of the
           gradient all-reduce; bench peak: the same bytes / (calls x the median time of a call of
           the mean size, alone, right after training: moe bench alltoallv and allreduce)
  GB = 1e9 bytes, MiB = 2^20 bytes

Files: DIR/metrics.jsonl has one object per step, written as it ends; the last line holds
weights_xxh3.
loss_hex is the loss in C's hexadecimal notation (%a): equal text means equal bits.
--trace and --record-routing: docs/trace.md.

Exit codes: 0 ok, 2 usage or settings, 3 malformed input, 4 a write failed, 5 out of memory,
6 loss or gradients not finite, or copies of a weight that differ, 7 a rank failed, 8 timeout,
9 rendezvous, 10 no such backend.
)";

}  // namespace

CommandHelp TrainHelp() {
  return {.head = kHead, .settings = TrainSettings(), .tail = kTail};
}

}  // namespace moe::cli
