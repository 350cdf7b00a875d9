// The flags of `moe verify` and its help.
#include <utility>

#include "kernels/base/storage_type.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/verify/verify_options.h"
#include "moe/lm/train_settings.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe verify [flags]

Runs one MoE layer, forward and backward, on the same batch in many layouts, and compares outputs,
gradients, losses and drop counts twice: every layout with the product on one rank, and that product
with a float64 loop that shares no code with it. Where --layouts names tensor or pipeline
parallelism, ZeRO, offload or recomputation, a model trains for some steps, and losses, loads,
gradient norms and final weights of every layout are compared with those of one rank. Ranks are
threads or, under mpirun, processes.

  moe verify
  moe verify --router deepseek-v3 --num-experts 12 --topk 3 --hidden-size 40
  moe verify --router mixtral --full --layouts 'ranks=2,4 ep=all'
  mpirun -n 4 moe verify                          layouts of 1 to 4 ranks over MPI
  moe verify --layouts 'tp=all pp=all vp=all schedule=all zero=all recompute=all'
  moe verify --layouts 'ranks=8 ep=4 tp=2 pp=2 zero=2 schedule=zb-h1'
  moe verify --inject gradient-scale-by-ep        finds the planted fault: exit 1
)";

constexpr char kTail[] =
    R"(
What must hold
  one rank against float64       |product - reference| <= bound, element by element
  layout against one rank        layout-invariant: 0 ulp; fast: |difference| <= 2 bound
  counts and drops               equal
The bound follows every operation with u = 2^-24 (float32; values stored as bf16 add 2^-8 each, as
f16 2^-11):
  a + b, a b, a / b              operands' errors by their derivatives, + u |result|
  sum of n terms t, any order    sum error(t) + n u sum |t|
  exp, log, sigmoid, erf         operand's error by its derivative, + 8 u |result|
  gradients                      + M 2^-51 for the grid of the exact sums
  kinks (ReLU, clamps)           where rounding may take either side, both slopes are allowed
Data: normal numbers from --seed. Two experts share a router row and tokens come in equal pairs, so
ties are there. If a choice of expert, or a drop, is closer than its rounding bound, the next seed
is taken and the reason printed. Every run makes two steps: the first moves the expert bias and
counts for the global loss; results are the second's.

Columns
  max ulp     floats between the two values, largest over the tensor
  max rel     |difference| / |expected|
  of bound    |difference| / bound; above 1 is a failure
  first       the first wrong element, else the first that differs; expert = first choice of a token

Without --layouts: ranks=1,2,3,4,8 ep=all transport=local dispatch=staged,direct,hierarchical
overlap=1,4 capacity=none,1.0, of which a pairwise cover is run: every two values of two axes meet
in some layout. --full runs all. Without --router: gates that cover all mechanisms. Under a launcher
that starts R ranks, transport is theirs and ranks are R and those below it; layouts of fewer run on
the first ranks, and rank 0 makes the products on one. With --device cuda all of them compute on
GPUs, which ranks take in turn, and dispatch is staged,direct. transport=nccl: a GPU for each rank;
threads: layouts of more ranks are skipped.

Exit codes: 0 all hold, 1 a comparison failed, 2 usage, 7 a rank failed, 8 timeout,
10 a transport or device was named that this machine or build has not.
)";

}  // namespace

Table VerifySettings(VerifyOptions& options, verify::ProblemSpec& spec) {
  // Small enough for seconds, odd enough for tails: no width is a multiple of a SIMD vector, two
  // experts are left over on four ranks, eight ranks have fewer experts than EP.
  spec.seed = 1;
  spec.layer = {.router = {.num_experts = 6,
                           .hidden_size = 28,
                           .aux_loss_coeff = 0.1f,
                           .z_loss_coeff = 0.01f},
                .ffn_hidden_size = 20};
  // Layers for four stages of two parts, heads for four tensor-parallel ranks.
  lm::TrainConfig& model = options.model;
  model.model.num_layers = model.model.num_attention_heads = 8;
  model.model.kv_channels = 4;
  model.sequence_length = 7;
  model.micro_batch_size = 2;
  model.steps = 3;
  std::vector<std::string> faults = FaultNames();
  faults.insert(faults.begin(), "help");
  Table t;
  t.Group("What is run");
  t.Add("--layouts 'AXIS=V,V ...'", Kind::kText,
        "axes ranks, ep (or all), transport, dispatch, overlap, capacity, and of a model tp, pp, "
        "vp, schedule, zero, recompute (or all), offload; others keep their defaults");
  t.Add("--full", Kind::kSwitch, "every combination, not a pairwise cover");
  t.Add("--backend NAME", {Kind::kWord, "auto", {"auto", "local", "mpi", "nccl"}},
        "local, mpi, nccl: transport=NAME of --layouts; auto: the launcher's, or local");
  t.Add("--numerics NAME", {Kind::kWord, "both", {"both", "fast", "layout-invariant"}},
        "of the product");
  t.Add("--dtype TYPE", {&spec.dtype, kStorageTypeWords}, "of activations and compute weights");
  AddBFloat16OrderSetting(options.bfloat16_order, t);
  t.Add("--micro-batches M", {Kind::kInteger, "9"}, "of the batch; one of them is empty").Least(1);
  t.Add("--micro-batch-tokens N", {Kind::kInteger, "7"},
        "tokens of the longest; their lengths differ unless padding or --moe-token-group N needs "
        "one")
      .Least(1);
  t.Add("--seed N", &spec.seed, "of data, weights and the gates' noise");
  t.Add("--inject FAULT", {Kind::kText, "", std::move(faults)},
        "plant a fault around the product, which must be found; help lists them")
      .FlagOnly();
  AddDeviceSetting(t);
  t.Group("Model, where --layouts names tp, pp, vp, schedule, zero, offload or recompute");
  const SettingRows rows = lm::RowsOf(model);
  t.Add("--num-layers N", rows, "transformer layers");
  t.Add("--num-attention-heads N", rows, "attention heads");
  t.Add("--num-query-groups N", rows, "heads of keys and values; 0 = --num-attention-heads")
      .Least(0);
  t.Add("--kv-channels N", rows, "width of a head, even; 0 = H / --num-attention-heads").Least(0);
  t.Add("--moe-layer-freq N", rows, "every N-th layer has experts; the others are dense");
  t.Add("--seq-length N", rows, "bytes that a sequence predicts");
  t.Add("--micro-batch-size N", rows, "sequences of a micro-batch").Least(1);
  t.Add("--steps N", rows, "optimiser steps");
  t.Add("--tensor-leaves S", {Kind::kWord, "8", {"1", "2", "4", "8", "16"}},
        "leaves of products that are balanced trees, at least tp");
  t.Group("Layer");
  AddShapeSettings(spec.layer, t);
  t.Group("Routing");
  AddRoutingSettings(spec.layer, t);
  t.Group("Output and settings");
  AddFormSettings(t);
  t.Add("-q, --quiet", &options.quiet, "failures and the summary alone");
  t.Add("-v, --verbose", &options.verbose, "a row for every tensor and every skipped layout");
  AddTimeoutSetting(t);
  AddHelpSettings(t);
  return t;
}

CommandHelp VerifyHelp() {
  VerifyOptions options;
  verify::ProblemSpec spec;
  return {.head = kHead, .settings = VerifySettings(options, spec).rows(), .tail = kTail};
}

}  // namespace moe::cli
