#include "moe/cli/base/foreign_flags.h"

#include <algorithm>
#include <utility>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_replace.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include "moe/io/bounded_json.h"

namespace moe::cli {
namespace {

using Texts = std::vector<std::string>;

constexpr ForeignUse kNeedless = ForeignUse::kNeedless;
constexpr ForeignUse kMemory = ForeignUse::kMemory;
constexpr ForeignUse kRenamed = ForeignUse::kRenamed;
constexpr ForeignUse kRefused = ForeignUse::kRefused;

constexpr char kAny[] = "*";
constexpr char kRotary[] = "positions are rotary";
constexpr char kNoDropout[] = "there is no dropout";
constexpr char kKernels[] = "kernels are chosen here, none changes results";
constexpr char kFloat32[] = "sums are in float32 or exact, by --numerics";
constexpr char kOverlaps[] = "gradients travel during backward";
constexpr char kOnlyExperts[] = "only experts are split over ranks, by --ep";
constexpr char kOfTensors[] = "of tensor parallelism, whose size is 1";
constexpr char kReports[] = "the end report and --out have it";
constexpr char kMapped[] = "token files are mapped";
constexpr char kNoCollector[] = "there is no garbage collector";
constexpr char kIds[] =
    "--tokens PREFIX --vocab-size N takes Megatron's .bin and .idx; there is no tokenizer";
constexpr char kWeightsAlone[] =
    "--init-from DIR starts from weights alone, of a public model or an export";
constexpr char kWhole[] = "activations are kept whole";
constexpr char kInMemory[] = "state stays in memory of the device that computes";
constexpr char kOfLauncher[] = "of the launcher: mpirun -n N moe train ..., or --ranks N threads";
constexpr char kTextFlags[] = "--data PATH or --tokens FILE; every 20th block is held out";
constexpr char kSteps[] = "a schedule is in steps: --steps, --lr-warmup-steps, --lr-decay-steps";
constexpr char kOneStream[] = "texts are one stream, whose documents are not told apart";
constexpr char kOwnFormat[] =
    "checkpoints have one format, docs/checkpoint.md; moe ckpt export writes "
    "Hugging Face's";
constexpr char kNoGraphs[] = "kernels are launched one by one";
constexpr char kNoFloat8[] = "--dtype f32, bf16 and f16 are what there is";

constexpr ForeignFlag kFlags[] = {
    // The model.
    {"normalization", kNeedless, "RMSNorm", "every norm is RMSNorm"},
    {"position-embedding-type", kNeedless, "rope", kRotary},
    {"no-position-embedding", kNeedless, "", kRotary},
    {"use-rotary-position-embeddings", kNeedless, "", kRotary},
    {"rotary-percent", kNeedless, "1", "all of a head is rotated"},
    {"softmax-type", kNeedless, "vanilla", "attention's softmax has no sink"},
    {"group-query-attention", kNeedless, "", "--num-query-groups N says it", "num-query-groups"},
    {"attention-dropout", kNeedless, "0", kNoDropout},
    {"hidden-dropout", kNeedless, "0", kNoDropout},
    {"make-vocab-size-divisible-by", kNeedless, "1",
     "--vocab-size is what there is: give it padded"},
    {"calculate-per-token-loss", kNeedless, "", "the loss is the mean over tokens"},
    // Kernels.
    {"use-mcore-models", kNeedless, "", kKernels},
    {"transformer-impl", kNeedless, kAny, kKernels},
    {"attention-backend", kNeedless, kAny, kKernels},
    {"use-flash-attn", kNeedless, "", kKernels},
    {"moe-grouped-gemm", kNeedless, "", kKernels},
    {"moe-permute-fusion", kNeedless, "", kKernels},
    {"moe-router-fusion", kNeedless, "", kKernels},
    {"cross-entropy-loss-fusion", kNeedless, "", kKernels},
    {"cross-entropy-fusion-impl", kNeedless, kAny, kKernels},
    {"no-masked-softmax-fusion", kNeedless, "", kKernels},
    {"no-bias-swiglu-fusion", kNeedless, "", kKernels},
    {"no-bias-gelu-fusion", kNeedless, "", kKernels},
    {"no-bias-dropout-fusion", kNeedless, "", kKernels},
    {"no-rope-fusion", kNeedless, "", kKernels},
    {"no-gradient-accumulation-fusion", kNeedless, "", kKernels},
    {"use-tutel", kNeedless, "", kKernels},
    {"moe-router-dtype", kNeedless, "fp32", "the router computes in float32"},
    {"attention-softmax-in-fp32", kNeedless, "", "softmax is in float32"},
    {"no-query-key-layer-scaling", kNeedless, "", "softmax is in float32"},
    {"accumulate-allreduce-grads-in-fp32", kNeedless, "", kFloat32},
    // Ranks.
    {"moe-token-dispatcher-type", kNeedless, "alltoall|alltoall_seq",
     "rows travel all-to-all, by --dispatch"},
    {"distributed-backend", kNeedless, "nccl|gloo", "--backend, or the launcher, says it"},
    {"local-rank", kNeedless, kAny, "the launcher's variables say it"},
    {"tensor-model-parallel-size", kNeedless, "1", kOnlyExperts},
    {"tp", kNeedless, "1", kOnlyExperts},
    {"expert-tensor-parallel-size", kNeedless, "1", kOnlyExperts},
    {"pipeline-model-parallel-size", kNeedless, "1", kOnlyExperts},
    {"pp", kNeedless, "1", kOnlyExperts},
    {"context-parallel-size", kNeedless, "1", kOnlyExperts},
    {"cp", kNeedless, "1", kOnlyExperts},
    {"sequence-parallel", kNeedless, "", kOfTensors},
    {"tp-comm-overlap", kNeedless, "", kOfTensors},
    {"overlap-grad-reduce", kNeedless, "", kOverlaps},
    {"overlap-param-gather", kNeedless, "", "with --zero weights are gathered while others move"},
    {"create-moe-param-group", kNeedless, "", "gradients of experts have a group of their own"},
    // Optimiser, data, records.
    {"optimizer", kNeedless, "adam", "the optimiser is AdamW"},
    {"lr-warmup-init", kNeedless, "0", "the warm-up begins at 0"},
    {"weight-decay-incr-style", kNeedless, "constant", "weight decay is constant"},
    {"split", kNeedless, "95,5,0", "every 20th block is held out, the others are trained on"},
    {"mlp-type", kNeedless, "standard", "a layer has no residual expert"},
    {"tokenizer-type", kNeedless, kAny, kIds, "tokens"},
    {"tokenizer-model", kNeedless, kAny, kIds, "tokens"},
    {"vocab-file", kNeedless, kAny, kIds, "tokens"},
    {"merge-file", kNeedless, kAny, kIds, "tokens"},
    {"num-workers", kNeedless, kAny, kMapped},
    {"data-cache-path", kNeedless, kAny, kMapped},
    {"no-mmap-bin-files", kNeedless, "", kMapped},
    {"no-create-attention-mask-in-dataloader", kNeedless, "", "attention is causal without a mask"},
    {"finetune", kNeedless, "", kWeightsAlone, "init-from"},
    {"no-load-optim", kNeedless, "", kWeightsAlone, "init-from"},
    {"no-load-rng", kNeedless, "", kWeightsAlone, "init-from"},
    {"auto-detect-ckpt-format", kNeedless, "", kOwnFormat},
    {"exit-signal-handler", kNeedless, "", "with --save SIGTERM saves and ends the run"},
    {"moe-per-layer-logging", kNeedless, "", kReports},
    {"log-throughput", kNeedless, "", kReports},
    {"timing-log-level", kNeedless, kAny, kReports},
    {"manual-gc", kNeedless, "", kNoCollector},
    {"manual-gc-interval", kNeedless, kAny, kNoCollector},

    {"recompute-activations", kMemory, "", kWhole},
    {"recompute-granularity", kMemory, kAny, kWhole},
    {"recompute-method", kMemory, kAny, kWhole},
    {"recompute-num-layers", kMemory, kAny, kWhole},
    {"recompute-modules", kMemory, kAny, kWhole},
    {"moe-layer-recompute", kMemory, "", kWhole},
    {"deepspeed-activation-checkpointing", kMemory, "", kWhole},
    {"moe-shared-expert-overlap", kMemory, "",
     "--moe-overlap-degree D overlaps exchange and experts"},
    {"optimizer-cpu-offload", kMemory, "", kInMemory},
    {"optimizer-offload-fraction", kMemory, kAny, kInMemory},
    {"empty-unused-memory-level", kMemory, kAny, "memory is taken once"},

    {"ffn-hidden-size", kRenamed, "N", "--moe-ffn-hidden-size, --dense-ffn-hidden-size"},
    {"padded-vocab-size", kRenamed, "N", "--vocab-size"},
    {"deepspeed", kRenamed, "", "--config"},
    {"deepspeed_config", kRenamed, "FILE", "--config"},
    {"zero-stage", kRenamed, "STAGE", "--zero"},
    {"moe-expert-parallel-size", kRenamed, "N", "--expert-model-parallel-size"},
    {"moe-loss-coeff", kRenamed, "X", "--moe-aux-loss-coeff"},
    {"moe-train-capacity-factor", kRenamed, "X", "--moe-expert-capacity-factor"},
    {"expert-interval", kRenamed, "N", "--moe-layer-freq"},

    // The model.
    {"rotary-interleaved", kRefused, "", "pairs of rotary positions are d and d + D / 2"},
    {"use-rope-scaling", kRefused, "", "--rotary-base X is what there is"},
    {"window-size", kRefused, kAny, "attention is causal, of the whole sequence"},
    {"apply-layernorm-1p", kRefused, "", "weights of a norm begin at 1"},
    {"multi-latent-attention", kRefused, "",
     "attention has queries, keys and values of a head each"},
    {"mtp-num-layers", kRefused, kAny, "one token is predicted"},
    {"moe-use-upcycling", kRefused, "", "a dense model is not made into one of experts"},
    {"moe-router-force-load-balancing", kRefused, "", "moe sweep --routing uniform measures that"},
    {"moe-eval-capacity-factor", kRefused, kAny, "evaluation has the capacity of training"},
    {"moe-min-capacity", kRefused, kAny, "capacity is ceil(T K X / E), docs/routing.md"},
    {"disable-moe-token-dropping", kRefused, "", "--moe-expert-capacity-factor none drops nothing"},
    {"noisy-gate-policy", kRefused, kAny,
     "--router noisy-topk, or switch with --moe-input-jitter-eps X"},
    {"fp8-format", kRefused, kAny, kNoFloat8},
    {"fp8-recipe", kRefused, kAny, kNoFloat8},
    {"fp8-param-gather", kRefused, "", kNoFloat8},
    {"grad-reduce-in-bf16", kRefused, "", kFloat32},
    // Ranks.
    {"num-layers-per-virtual-pipeline-stage", kRefused, kAny, kOnlyExperts},
    {"enable-expert-tensor-parallelism", kRefused, "", kOnlyExperts},
    {"data-parallel-size", kRefused, kAny, "it is the number of ranks over --ep"},
    {"dp", kRefused, kAny, "it is the number of ranks over --ep"},
    {"moe-enable-deepep", kRefused, "", "--dispatch says how rows travel"},
    {"overlap-moe-expert-parallel-comm", kRefused, "",
     "--moe-overlap-degree D overlaps exchange and experts"},
    {"enable-cuda-graph", kRefused, "", kNoGraphs},
    {"external-cuda-graph", kRefused, "", kNoGraphs},
    {"ddp-bucket-size", kRefused, kAny, "--bucket-size-mb MiB"},
    {"distributed-timeout-minutes", kRefused, kAny, "--comm-timeout SECONDS"},
    {"nproc-per-node", kRefused, kAny, kOfLauncher},
    {"nnodes", kRefused, kAny, kOfLauncher},
    {"node-rank", kRefused, kAny, kOfLauncher},
    {"master-addr", kRefused, kAny, kOfLauncher},
    {"master-port", kRefused, kAny, kOfLauncher},
    // Steps and data.
    {"train-samples", kRefused, kAny, kSteps},
    {"lr-warmup-samples", kRefused, kAny, kSteps},
    {"lr-decay-samples", kRefused, kAny, kSteps},
    {"lr-warmup-fraction", kRefused, kAny, kSteps},
    {"rampup-batch-size", kRefused, kAny, "--global-batch-size is of every step"},
    {"eval-iters", kRefused, kAny, "--eval-sequences N = iterations x --global-batch-size"},
    {"mock-data", kRefused, "", "--data PATH, of any text"},
    {"train-data-path", kRefused, kAny, kTextFlags},
    {"valid-data-path", kRefused, kAny, kTextFlags},
    {"test-data-path", kRefused, kAny, kTextFlags},
    {"reset-position-ids", kRefused, "", kOneStream},
    {"reset-attention-mask", kRefused, "", kOneStream},
    {"eod-mask-loss", kRefused, "", kOneStream},
    // Checkpoints and records.
    {"load", kRefused, kAny,
     "--resume auto goes on from the newest checkpoint in --save; --init-from DIR starts from "
     "weights"},
    {"ckpt-format", kRefused, kAny, kOwnFormat},
    {"no-save-optim", kRefused, "", kOwnFormat},
    {"no-save-rng", kRefused, "", kOwnFormat},
    {"use-checkpoint-args", kRefused, "",
     "give the flags of that run, which its end report prints"},
    {"exit-interval", kRefused, kAny, "--steps N; --save keeps a run that is asked to stop"},
    {"exit-duration-in-mins", kRefused, kAny,
     "with --save SIGTERM saves and ends the run: timeout 3600 moe train"},
    {"tensorboard-dir", kRefused, kAny, kInMetrics},
    {"wandb-project", kRefused, kAny, kInMetrics},
    {"wandb-exp-name", kRefused, kAny, kInMetrics},
    {"wandb-save-dir", kRefused, kAny, kInMetrics},
};

std::string Dashed(absl::string_view name) {
  return absl::StrReplaceAll(name, {{"_", "-"}});
}

bool Equal(absl::string_view given, absl::string_view value) {
  double a = 0, b = 0;
  return given == value || (absl::SimpleAtod(given, &a) && absl::SimpleAtod(value, &b) && a == b);
}

bool IsTaken(const GivenFlag& given) {
  const absl::string_view values = given.row->values;
  if (values == kAny) return !given.values.empty();
  if (values.empty()) return given.values.empty();
  const std::vector<absl::string_view> all = absl::StrSplit(values, '|');
  return given.values.size() == 1 &&
         std::any_of(all.begin(), all.end(),
                     [&](absl::string_view value) { return Equal(given.values.front(), value); });
}

// "--normalization RMSNorm"
std::string Written(const GivenFlag& given) {
  return absl::StrCat(given.flag, given.values.empty() ? "" : " ",
                      Shown(absl::StrJoin(given.values, " ")));
}

std::string WrongValueOf(const GivenFlag& given) {
  const ForeignFlag& row = *given.row;
  const std::string text = absl::StrJoin(given.values, " ");
  const std::string expected = *row.values == 0 ? "no value"
                               : row.values == absl::string_view(kAny)
                                   ? "a value"
                                   : absl::StrReplaceAll(row.values, {{"|", " or "}});
  return absl::StrCat(given.flag,
                      text.empty() ? " has no value" : absl::StrCat(" is ", Shown(text)),
                      ", expected ", expected, ": ", row.text);
}

// Sets the flags that a renamed flag stands for, except those that are given themselves.
void Rename(const GivenFlag& given, Settings& settings, std::vector<std::string>& refused,
            std::vector<std::string>& needless) {
  const ForeignFlag& row = *given.row;
  if (given.values.empty() && *row.values == 0) return needless.push_back(given.flag);
  if (given.values.size() != 1) {
    refused.push_back(
        absl::StrCat(given.flag, " ", row.values, " sets ", row.text, ", expected one value"));
    return;
  }
  for (const absl::string_view flag : absl::StrSplit(row.text, ", ")) {
    const Setting* const setting = settings.Find(absl::StripPrefix(flag, "--"));
    if (setting == nullptr) {
      refused.push_back(absl::StrCat("unknown flag '", given.flag, "'; ", row.text));
      return;
    }
    if (settings.value(setting->name).origin == Origin::kFlag) continue;
    const absl::Status status = settings.Set(*setting, given.values, Origin::kFlag, given.flag);
    if (status.ok()) continue;
    refused.emplace_back(status.message());
    return;
  }
}

void Warn(const char* what, const std::vector<std::string>& flags,
          std::vector<std::string>& warnings) {
  if (!flags.empty()) warnings.push_back(absl::StrCat(what, absl::StrJoin(flags, ", ")));
}

}  // namespace

absl::Span<const ForeignFlag> ForeignFlags() {
  return kFlags;
}

const ForeignFlag* FindForeignFlag(absl::string_view name) {
  const std::string wanted = Dashed(name);
  for (const ForeignFlag& row : kFlags) {
    if (Dashed(row.name) == wanted) return &row;
  }
  return nullptr;
}

void TakeForeignFlags(absl::Span<const GivenFlag> flags, Settings& settings,
                      std::vector<std::string>& refused, std::vector<std::string>& warnings) {
  Texts needless, memory;
  std::vector<std::pair<const char*, Texts>> unknown;  // by what to do instead
  for (const GivenFlag& given : flags) {
    const ForeignFlag& row = *given.row;
    const bool alone =
        *row.beside != 0 && (settings.Find(row.beside) == nullptr || !settings.given(row.beside));
    if (row.use == kRefused || alone) {
      const auto same = std::find_if(unknown.begin(), unknown.end(), [&](const auto& entry) {
        return entry.first == absl::string_view(row.text);
      });
      auto& entry = same != unknown.end() ? *same : unknown.emplace_back(row.text, Texts());
      entry.second.push_back(absl::StrCat("'", given.flag, "'"));
    } else if (row.use == kRenamed) {
      Rename(given, settings, refused, needless);
    } else if (!IsTaken(given)) {
      refused.push_back(WrongValueOf(given));
    } else {
      (row.use == kMemory ? memory : needless).push_back(Written(given));
    }
  }
  for (const auto& [text, names] : unknown) {
    refused.push_back(absl::StrCat("unknown flag", names.size() > 1 ? "s " : " ",
                                   absl::StrJoin(names, ", "), "; ", text));
  }
  Warn("not needed, as it is done anyway: ", needless, warnings);
  Warn(kMemoryAlone, memory, warnings);
}

}  // namespace moe::cli
