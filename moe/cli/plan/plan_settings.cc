// The flags of `moe plan`, its help, and how they become settings of moe train.
#include <algorithm>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/plan/plan_options.h"

namespace moe::cli {
namespace {

constexpr char kHead[] =
    R"(usage: moe plan --model DIR|config.json --gpus N [flags]

Finds how to lay out the training of a public model over ranks: pipeline, tensor, expert and
expert-tensor parallelism, ZeRO, schedule, recomputation and micro-batch, by predicted step time and
memory. It shows the best layout of each mesh and the moe train line that runs it, and why others do
not fit.
Without --check nothing is run, and no GPU is needed.

  moe plan --model Qwen3-30B-A3B --gpus 64 --gpu h100
  moe plan --model config.json --gpus 2048 --hbm 64GiB --goal fits -o json
  moe plan --model DIR --gpus 10240 --routing-trace dirichlet:30 --mtbf 3
)";

constexpr char kTail[] = R"(
Predicted, for the stage that takes longest (docs/plan.md):
  products   2 N / (peak e (1 + r / rows)) for N elements of a matrix, thrice with backward; an
             expert has T EP ETP K / E rows
  memory     T (30 H + K (12 F + 10 H)) elements of a layer over bandwidth
  tensors    rows and float32 sums of ranks that share matrices: of experts T K (ETP - 1) H (b + 4)
             bytes each way
  exchange   T EP (1 - C(E - E/EP, K) / C(E, K)) rows to experts and T K home, forward and backward,
             over the slower of the links within and between nodes
  routing    rows of the busiest rank of the slowest expert-parallel group over even rows multiply
             experts and exchange (--routing-trace)
  bubble     the lists of the pipeline's schedule, simulated; less where ranks share cores
  gradients  sums and gathered weights, less what a round's passes hide
  memory of a rank: as moe train --dry-run, with room to grow

  interval   of checkpoints: sqrt(2 stall mtbf)

Columns: PP x TP x EP, ETP where ranks share experts, DP (of layers without experts), schedule with
its chunks, again (what is computed again), mb (sequences of a micro-batch), bubble (of a stage's
work), exchange (rows to experts and home), gradients (their part that passes do not hide), memory
of a rank: weights, sums of gradients, optimiser, activations with buffers.
Keys of the other forms: docs/plan.md. Meshes of which no layout fits have status "too big".

Exit codes: 0 a layout fits, 2 usage, 3 a malformed config.json, calibration or trace, 5 no layout
fits.
)";

// Settings of moe train that hold for every layout.
constexpr const char* kShared[] = {"data",  "tokens",   "tokens-dtype",  "seq-length",
                                   "dtype", "numerics", "tensor-leaves", "moe-aux-loss-coeff"};

std::vector<std::string> GpuWords() {
  std::vector<std::string> words;
  for (const plan::GpuData& gpu : plan::Gpus()) words.emplace_back(gpu.name);
  return words;
}

}  // namespace

Table PlanSettings(PlanOptions& options) {
  Table t;
  t.Group("What");
  t.Add("--model PATH", &options.model,
        "config.json of a public model that moe train has (mixtral, olmoe, qwen2_moe, qwen3_moe), "
        "or its folder");
  t.Add("--global-batch-size N", &options.sequences, "sequences of a step; 0 = 16 for each rank")
      .Least(0);
  const Table train = TrainSettings();
  for (const Setting& row : train.rows()) {
    if (std::find(std::begin(kShared), std::end(kShared), row.name) == std::end(kShared)) continue;
    Setting copy = row;
    copy.group = "What";
    if (row.name == "dtype") copy.fallback = "bf16";
    if (row.name == "seq-length") copy.fallback = "4096";
    t.Add(copy);
  }
  t.Group("Where");
  t.Add("--gpus, --ranks N", &options.ranks, "ranks").Least(1);
  t.Add("--node N", &options.node, "ranks of a node; 0 = those of --gpu's machines").Least(0);
  t.Add("--gpu NAME", {&options.gpu, GpuWords()}, "published figures of a GPU");
  t.Add("--hbm SIZE", &options.memory, "memory of a rank: 80GiB, 64e9; default: the GPU's");
  t.Add("--calibrate FILE", &options.calibration,
        "what the machine that is planned for measured, in place of --gpu: metrics.jsonl of moe "
        "train, or rows of moe bench layer, memcpy, alltoallv and allreduce; of a CPU with as many "
        "ranks; may be given several times");
  t.Add("--routing-trace WHAT", &options.routing,
        "how uneven routing is: the file of moe train --record-routing, or dirichlet:A, drawn, the "
        "larger A the more even");
  t.Group("How");
  t.Add("--goal WHAT", {&options.goal, plan::kGoalWords},
        "throughput: the least predicted step time; fits: the least memory");
  t.Add("--top N", &options.shown, "meshes shown").Least(1);
  t.Add("--check K", &options.check,
        "train the first K layouts here, on threads or under mpirun, and show measured beside "
        "predicted; with --calibrate")
      .Least(0);
  t.Add("--steps N", &options.steps, "of each repetition of a layout that is checked").Least(2);
  t.Add("-r, --repetitions N", &options.repetitions,
        "of each layout that is checked, in turns; the shortest step counts")
      .Least(1);
  t.Add("--mtbf HOURS", &options.mtbf_hours,
        "mean time between failures of the whole job: shows how often it should save")
      .Above(0);
  t.Add("--stall SECONDS", &options.stall_s, "that a checkpoint stalls steps, with --mtbf")
      .Above(0);
  AddFormSettings(t);
  AddHelpSettings(t);
  return t;
}

absl::StatusOr<Settings> TrainSettingsOf(const lm::TransformerConfig& model,
                                         const Settings& settings, const PlanOptions& options,
                                         DeviceKind device) {
  Settings train(TrainSettings());
  const auto set = [&](const char* name, std::vector<std::string> texts) {
    return train.Set(*train.Find(name), std::move(texts), Origin::kFlag, absl::StrCat("--", name));
  };
  MOE_RETURN_IF_ERROR(set("ranks", {absl::StrCat(options.ranks)}));
  if (device != DeviceKind::kCpu) {
    MOE_RETURN_IF_ERROR(set("device", {"cuda"}));
    // Uses the links of all ranks of a node, as predicted; the ring uses one at a time.
    if (options.ranks > 1) MOE_RETURN_IF_ERROR(set("all-reduce", {"library"}));
  }
  for (auto& [name, text] : SettingsOf(model)) MOE_RETURN_IF_ERROR(set(name, {std::move(text)}));
  for (const char* const name : kShared) {
    if (settings.given(name)) MOE_RETURN_IF_ERROR(set(name, settings.value(name).texts));
  }
  for (const char* const name : {"seq-length", "dtype"}) {
    MOE_RETURN_IF_ERROR(set(name, settings.value(name).texts));
  }
  if (settings.empty("data") && settings.empty("tokens")) {
    MOE_RETURN_IF_ERROR(set("tokens", {"TOKENS"}));
  }
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(train));
  return train;
}

absl::StatusOr<TrainOptions> CheckTrainSettings(const Settings& train, int ranks) {
  const Backend backend =
      train.is("device", "cuda") && ranks > 1 ? Backend::kNccl : Backend::kLocal;
  return MakeTrainOptions(train, {.ranks = ranks, .local_ranks = ranks, .backend = backend});
}

std::string TrainLine(const Settings& train) {
  return absl::StrCat("moe train", FlagsOf(train, [](const Setting&) { return false; }));
}

CommandHelp PlanHelp() {
  PlanOptions defaults;
  return {.head = kHead, .settings = PlanSettings(defaults).Unbound().rows(), .tail = kTail};
}

}  // namespace moe::cli
