// The flags of `moe verify` and its help.
#include "moe/cli/command.h"
#include "moe/cli/common_settings.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/verify_options.h"

namespace moe::cli {
namespace {

// Small enough for seconds, odd enough for tails: no width is a multiple of a SIMD vector, two
// experts are left over on four ranks, eight ranks have fewer experts than EP.
constexpr LayerDefaults kShape = {.num_experts = 6,
                                  .hidden_size = 28,
                                  .ffn_hidden_size = 20,
                                  .aux_loss_coeff = 0.1,
                                  .z_loss_coeff = 0.01};

constexpr char kHead[] =
    R"(usage: moe verify [flags]

Runs one MoE layer, forward and backward, on the same batch in many layouts, and compares outputs,
gradients, losses and drop counts twice: every layout with the product on one rank, and that product
with a float64 loop that shares no code with it. Starts its MPI processes itself.

  moe verify
  moe verify --router deepseek-v3 --num-experts 12 --topk 3 --hidden-size 40
  moe verify --router mixtral --full --layouts 'ranks=2,4 ep=all transport=local'
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

Without --layouts: ranks=1,2,3,4,8 ep=all transport=local,mpi dispatch=staged,direct,hierarchical
overlap=1,4 capacity=none,1.0, of which a pairwise cover is run: every two values of two axes meet
in some layout. --full runs all. Without --router: gates that cover all mechanisms. With --device
cuda all of them compute on GPUs, which ranks take in turn, and transport is local, dispatch
staged,direct. transport=nccl: a GPU for each rank, layouts of more ranks are skipped.

Exit codes: 0 all hold, 1 a comparison failed, 2 usage or under a launcher, 7 a rank failed,
8 timeout, 10 a transport or device was named that this machine or build has not.
)";

std::vector<std::string> FaultWords() {
  std::vector<std::string> words = {"help"};
  for (const verify::FaultInfo& info : verify::Faults()) words.emplace_back(info.name);
  return words;
}

void AddRun(std::vector<Setting>& table) {
  const char* const kGroup = "What is run";
  table.insert(
      table.end(),
      {{kGroup, "layouts", "", 0, Kind::kText, "'AXIS=V,V ...'", "",
        "axes ranks, ep (or all), transport, dispatch, overlap, capacity; others keep their "
        "defaults"},
       {kGroup, "full", "", 0, Kind::kSwitch, "", "", "every combination, not a pairwise cover"},
       {kGroup,
        "backend",
        "",
        0,
        Kind::kWord,
        "NAME",
        "auto",
        "local, mpi, nccl: transport=NAME of --layouts; auto: local and mpi, with --device cuda "
        "local",
        {"auto", "local", "mpi", "nccl"}},
       {kGroup,
        "numerics",
        "",
        0,
        Kind::kWord,
        "NAME",
        "both",
        "of the product",
        {"both", "fast", "layout-invariant"}},
       {kGroup,
        "dtype",
        "",
        0,
        Kind::kWord,
        "TYPE",
        "f32",
        "of activations and compute weights",
        {"f32", "bf16", "f16"}},
       {kGroup, "micro-batches", "", 0, Kind::kInteger, "M", "9",
        "of the batch; one of them is empty"},
       {kGroup, "micro-batch-tokens", "", 0, Kind::kInteger, "N", "7",
        "tokens of the longest; their lengths differ unless padding or --moe-token-group N needs "
        "one"},
       {kGroup, "seed", "", 0, Kind::kSeed, "N", "1", "of data, weights and the gates' noise"},
       {kGroup, "inject", "", 0, Kind::kText, "FAULT", "",
        "plant a fault around the product, which must be found; help lists them", FaultWords(),
        true}});
}

void AddOutput(std::vector<Setting>& table) {
  const char* const kGroup = "Output and settings";
  AddFormSettings(kGroup, table);
  table.insert(table.end(),
               {{kGroup, "mpirun", "", 0, Kind::kText, "PROGRAM", "",
                 "starts ranks that are processes; default: mpirun of the MPI that this build is "
                 "linked with, "
                 "and ranks over NCCL are threads, a GPU each"},
                {kGroup, "quiet", "", 'q', Kind::kSwitch, "", "", "failures and the summary alone"},
                {kGroup, "verbose", "", 'v', Kind::kSwitch, "", "", "a row for every tensor"}});
  AddTimeoutSetting(kGroup, table);
  AddHelpSettings(kGroup, table);
}

}  // namespace

std::vector<Setting> VerifySettings() {
  std::vector<Setting> table;
  AddRun(table);
  AddDeviceSetting("What is run", table);
  AddShapeSettings("Layer", kShape, table);
  AddRoutingSettings("Routing", kShape, table);
  AddOutput(table);
  return table;
}

CommandHelp VerifyHelp() {
  return {.head = kHead, .settings = VerifySettings(), .tail = kTail};
}

}  // namespace moe::cli
