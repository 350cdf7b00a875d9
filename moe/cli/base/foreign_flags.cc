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

using enum ForeignUse;

constexpr char kAny[] = "*";
constexpr char kFloat32[] = "sums are in float32 or exact, by --numerics";
constexpr char kOtherSplits[] = "matrices and layers are split over ranks, by --tp, --etp and --pp";
constexpr char kOwnFormat[] =
    "checkpoints have one format, docs/checkpoint.md; moe ckpt export writes "
    "Hugging Face's";

// Flags that mean the same, each with the values that it takes: "recompute-method *".
struct Meaning {
  ForeignUse use;
  const char* flags;
  const char* text;
  const char* beside = "";
};
constexpr Meaning kMeanings[] = {
    // The model.
    {kNeedless, "normalization RMSNorm", "every norm is RMSNorm"},
    {kNeedless,
     "position-embedding-type rope, no-position-embedding, use-rotary-position-embeddings",
     "positions are rotary"},
    {kNeedless, "rotary-percent 1", "all of a head is rotated"},
    {kNeedless, "softmax-type vanilla", "attention's softmax has no sink"},
    {kNeedless, "group-query-attention", "--num-query-groups N says it", "num-query-groups"},
    {kNeedless, "attention-dropout 0, hidden-dropout 0", "there is no dropout"},
    {kNeedless, "make-vocab-size-divisible-by 1", "--vocab-size is what there is: give it padded"},
    {kNeedless, "calculate-per-token-loss", "the loss is the mean over tokens"},
    // Kernels.
    {kNeedless,
     "use-mcore-models, transformer-impl *, attention-backend *, use-flash-attn, moe-grouped-gemm, "
     "moe-permute-fusion, moe-router-fusion, cross-entropy-loss-fusion, "
     "cross-entropy-fusion-impl *, no-masked-softmax-fusion, no-bias-swiglu-fusion, "
     "no-bias-gelu-fusion, no-bias-dropout-fusion, no-rope-fusion, "
     "no-gradient-accumulation-fusion, use-tutel",
     "kernels are chosen here, none changes results"},
    {kNeedless, "moe-router-dtype fp32", "the router computes in float32"},
    {kNeedless, "attention-softmax-in-fp32, no-query-key-layer-scaling", "softmax is in float32"},
    {kNeedless, "accumulate-allreduce-grads-in-fp32", kFloat32},
    // Ranks.
    {kNeedless, "moe-token-dispatcher-type alltoall|alltoall_seq",
     "rows travel all-to-all, by --dispatch"},
    {kNeedless, "distributed-backend nccl|gloo", "--backend, or the launcher, says it"},
    {kNeedless, "local-rank *", "the launcher's variables say it"},
    {kNeedless, "context-parallel-size 1, cp 1", kOtherSplits},
    {kNeedless, "sequence-parallel", "ranks of --tp always divide the rows between layers"},
    {kNeedless, "tp-comm-overlap",
     "ranks of --tp wait for the rows that they gather, and for their sums"},
    {kNeedless, "overlap-grad-reduce", "gradients travel during backward"},
    {kNeedless, "overlap-param-gather", "with --zero weights are gathered while others move"},
    {kNeedless, "create-moe-param-group", "gradients of experts have a group of their own"},
    // Optimiser, data, records.
    {kNeedless, "optimizer adam", "the optimiser is AdamW"},
    {kNeedless, "lr-warmup-init 0", "the warm-up begins at 0"},
    {kNeedless, "weight-decay-incr-style constant", "weight decay is constant"},
    {kNeedless, "split 95,5,0", "every 20th block is held out, the others are trained on"},
    {kNeedless, "mlp-type standard", "a layer has no residual expert"},
    {kNeedless, "tokenizer-type *, tokenizer-model *, vocab-file *, merge-file *",
     "--tokens PREFIX --vocab-size N takes Megatron's .bin and .idx (scripts/tokenize.py)",
     "tokens"},
    {kNeedless, "num-workers *, data-cache-path *, no-mmap-bin-files", "token files are mapped"},
    {kNeedless, "no-create-attention-mask-in-dataloader", "attention is causal without a mask"},
    {kNeedless, "finetune, no-load-optim, no-load-rng",
     "--init-from DIR starts from weights alone, of a public model or an export", "init-from"},
    {kNeedless, "auto-detect-ckpt-format", kOwnFormat},
    {kNeedless, "exit-signal-handler", "with --save SIGTERM saves and ends the run"},
    {kNeedless, "moe-per-layer-logging, log-throughput, timing-log-level *",
     "the end report and --out have it"},
    {kNeedless, "manual-gc, manual-gc-interval *", "there is no garbage collector"},

    {kMemory,
     "recompute-activations, recompute-granularity *, recompute-method *, recompute-num-layers *, "
     "recompute-modules *, moe-layer-recompute, deepspeed-activation-checkpointing",
     "--recompute activations or layer"},
    {kMemory, "moe-shared-expert-overlap", "--moe-overlap-degree D overlaps exchange and experts"},
    {kMemory, "optimizer-cpu-offload, optimizer-offload-fraction *",
     "--offload optimizer and optimizer:file=DIR move all of it"},
    {kMemory, "empty-unused-memory-level *", "memory is taken once"},

    {kRenamed, "ffn-hidden-size N", "--moe-ffn-hidden-size, --dense-ffn-hidden-size"},
    {kRenamed, "padded-vocab-size N", "--vocab-size"},
    {kRenamed, "deepspeed, deepspeed_config FILE", "--config"},
    {kRenamed, "zero-stage STAGE", "--zero"},
    {kRenamed, "moe-expert-parallel-size N", "--expert-model-parallel-size"},
    {kRenamed, "moe-loss-coeff X", "--moe-aux-loss-coeff"},
    {kRenamed, "moe-train-capacity-factor X", "--moe-expert-capacity-factor"},
    {kRenamed, "expert-interval N", "--moe-layer-freq"},

    // The model.
    {kRefused, "rotary-interleaved", "pairs of rotary positions are d and d + D / 2"},
    {kRefused, "use-rope-scaling", "--rotary-base X is what there is"},
    {kRefused, "window-size *", "attention is causal, of the whole sequence"},
    {kRefused, "apply-layernorm-1p", "weights of a norm begin at 1"},
    {kRefused, "multi-latent-attention", "attention has queries, keys and values of a head each"},
    {kRefused, "mtp-num-layers *", "one token is predicted"},
    {kRefused, "moe-use-upcycling", "--init-from DENSE --upcycle E"},
    {kRefused, "moe-router-force-load-balancing", "moe sweep --routing uniform measures that"},
    {kRefused, "moe-eval-capacity-factor *", "evaluation has the capacity of training"},
    {kRefused, "moe-min-capacity *", "capacity is ceil(T K X / E), docs/routing.md"},
    {kRefused, "disable-moe-token-dropping", "--moe-expert-capacity-factor none drops nothing"},
    {kRefused, "noisy-gate-policy *",
     "--router noisy-topk, or switch with --moe-input-jitter-eps X"},
    {kRefused, "fp8-format *, fp8-recipe *, fp8-param-gather",
     "--dtype f32, bf16 and f16 are what there is"},
    {kRefused, "grad-reduce-in-bf16", kFloat32},
    // Ranks.
    {kRefused, "num-layers-per-virtual-pipeline-stage *",
     "--vp N makes chunks of num-layers / (PP VP) layers, or of --pipeline-layout"},
    {kRefused,
     "pipeline-model-parallel-layout *, decoder-first-pipeline-num-layers *, "
     "decoder-last-pipeline-num-layers *",
     "--pipeline-layout N,N,... has the layers of each part"},
    {kRefused, "enable-expert-tensor-parallelism", "--etp N shares the matrices of experts"},
    {kRefused, "data-parallel-size *, dp *", "it is the number of ranks over --ep"},
    {kRefused, "moe-enable-deepep", "--dispatch says how rows travel"},
    {kRefused, "overlap-moe-expert-parallel-comm",
     "--pipeline-schedule 1f1b-overlap hides exchanges behind another micro-batch"},
    {kRefused, "enable-cuda-graph, external-cuda-graph", "kernels are launched one by one"},
    {kRefused, "ddp-bucket-size *", "--bucket-size-mb MiB"},
    {kRefused, "distributed-timeout-minutes *", "--comm-timeout SECONDS"},
    {kRefused, "nproc-per-node *, nnodes *, node-rank *, master-addr *, master-port *",
     "of the launcher: mpirun -n N moe train ..., or --ranks N threads"},
    // Steps and data.
    {kRefused, "train-samples *, lr-warmup-samples *, lr-decay-samples *, lr-warmup-fraction *",
     "a schedule is in steps: --steps, --lr-warmup-steps, --lr-decay-steps"},
    {kRefused, "rampup-batch-size *", "--global-batch-size is of every step"},
    {kRefused, "eval-iters *", "--eval-sequences N = iterations x --global-batch-size"},
    {kRefused, "mock-data", "--data PATH, of any text"},
    {kRefused, "train-data-path *, valid-data-path *, test-data-path *",
     "--data PATH or --tokens FILE; every 20th block is held out"},
    // Checkpoints and records.
    {kRefused, "load *",
     "--resume auto goes on from the newest checkpoint in --save; --init-from DIR starts from "
     "weights"},
    {kRefused, "ckpt-format *, no-save-optim, no-save-rng", kOwnFormat},
    {kRefused, "use-checkpoint-args", "give the flags of that run, which its end report prints"},
    {kRefused, "exit-interval *", "--steps N; --save keeps a run that is asked to stop"},
    {kRefused, "exit-duration-in-mins *",
     "with --save SIGTERM saves and ends the run: timeout 3600 moe train"},
    {kRefused, "wandb-project *, wandb-exp-name *, wandb-save-dir *", kInMetrics},
};

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
  const std::string expected = row.values.empty() ? "no value"
                               : row.values == kAny
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
  if (given.values.empty() && row.values.empty()) return needless.push_back(given.flag);
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
  static const std::vector<ForeignFlag> rows = [] {
    std::vector<ForeignFlag> all;
    for (const auto& [use, flags, text, beside] : kMeanings) {
      for (const absl::string_view flag : absl::StrSplit(flags, ", ")) {
        const std::pair<std::string, std::string> parts =
            absl::StrSplit(flag, absl::MaxSplits(' ', 1));
        all.push_back({parts.first, use, parts.second, text, beside});
      }
    }
    return all;
  }();
  return rows;
}

const ForeignFlag* FindForeignFlag(absl::string_view name) {
  const std::string wanted = Dashed(name);
  for (const ForeignFlag& row : ForeignFlags()) {
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
