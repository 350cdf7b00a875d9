// DeepSpeed's configuration keys, where they mean the same here.
#include <algorithm>
#include <cmath>
#include <map>
#include <set>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "moe/cli/base/config_file.h"
#include "moe/cli/base/foreign_flags.h"
#include "moe/io/bounded_json.h"

namespace moe::cli {
namespace {

struct SameMeaning {
  const char* key;
  const char* setting;
};

constexpr char kRate[] = "optimizer.params.lr";
constexpr char kPeak[] = "scheduler.params.warmup_max_lr";
constexpr char kWarmup[] = "scheduler.params.warmup_num_steps";
constexpr char kStage[] = "zero_optimization.stage";
constexpr char kOffloadDevice[] = "zero_optimization.offload_optimizer.device";
constexpr char kOffloadPath[] = "zero_optimization.offload_optimizer.nvme_path";

// Keys by which a model's activations are computed again.
constexpr const char* kRecompute[] = {
    "activation_checkpointing.partition_activations",
    "activation_checkpointing.cpu_checkpointing",
    "activation_checkpointing.contiguous_memory_optimization",
    "activation_checkpointing.number_checkpoints",
};

// Keys of fp16 have no effect while fp16.enabled is false.
constexpr SameMeaning kSame[] = {
    {"train_batch_size", "train-batch-size"},
    {"train_micro_batch_size_per_gpu", "micro-batch-size"},
    {"gradient_accumulation_steps", "gradient-accumulation-steps"},
    {"gradient_clipping", "clip-grad"},
    {"steps_per_print", "log-interval"},
    {kRate, "lr"},
    {"optimizer.params.betas.0", "adam-beta1"},
    {"optimizer.params.betas.1", "adam-beta2"},
    {"optimizer.params.eps", "adam-eps"},
    {"optimizer.params.weight_decay", "weight-decay"},
    {"pipeline.stages", "pipeline-model-parallel-size"},
    {kStage, "zero"},
    {"fp16.loss_scale", "loss-scale"},
    {"fp16.loss_scale_window", "loss-scale-window"},
    {"fp16.hysteresis", "hysteresis"},
    {"fp16.min_loss_scale", "min-loss-scale"},
};

// Keys from which several settings follow.
constexpr const char* kSpecial[] = {
    "bf16.enabled",
    "fp16.enabled",
    "fp16.initial_scale_power",
    "optimizer.type",
    "optimizer.params.adam_w_mode",
    "optimizer.params.bias_correction",
    "scheduler.type",
    "scheduler.params.warmup_type",
    kWarmup,
    "scheduler.params.warmup_min_lr",
    kPeak,
    "scheduler.params.warmup_min_ratio",
    "scheduler.params.cos_min_ratio",
    "scheduler.params.total_num_steps",
    kOffloadDevice,
    kOffloadPath,
};

// Keys without a counterpart. A section is on by the value of its key `by`; a plain key, or a
// section that is only there to be used, by its own. While off, or `neutral`, it has no effect.
struct Elsewhere {
  const char* key;
  const char* by;
  const char* neutral;
  const char* why;
};

constexpr char kInTrace[] = "--trace FILE has the time line";
constexpr char kFloatSums[] = "gradients are summed in float32 or exactly, by --numerics";
constexpr char kAllLayers[] = "a step runs every layer";
constexpr char kInOrder[] = "sequences have one length, in the order of --seed";

constexpr Elsewhere kElsewhere[] = {
    {"amp", "enabled", "", "bf16 or fp16 is what there is"},
    {"autotuning", "enabled", "", "moe sweep compares settings"},
    {"checkpoint", "load_universal", "", "training state is not loaded yet"},
    {"comet", "enabled", "", kInMetrics},
    {"comms_logger", "enabled", "", kInTrace},
    {"communication_data_type", "", "fp32", kFloatSums},
    {"compression_training", "", "", "weights are neither quantised nor pruned"},
    {"csv_monitor", "enabled", "", kInMetrics},
    {"curriculum_learning", "enabled", "", kInOrder},
    {"data_efficiency", "enabled", "", kInOrder},
    {"data_types", "grad_accum_dtype", "fp32", kFloatSums},
    {"eigenvalue", "enabled", "", "there is no quantisation that needs it"},
    {"elasticity", "enabled", "", "a run keeps its ranks"},
    {"flops_profiler", "enabled", "", kInTrace},
    {"gradient_predivide_factor", "", "1", kFloatSums},
    {"hybrid_engine", "enabled", "", "nothing is generated while training"},
    {"load_universal_checkpoint", "", "", "training state is not loaded yet"},
    {"nebula", "enabled", "", "training state is not saved yet"},
    {"pld", "enabled", "", kAllLayers},
    {"prescale_gradients", "", "", kFloatSums},
    {"progressive_layer_drop", "enabled", "", kAllLayers},
    {"seq_parallel_communication_data_type", "", "fp32", kFloatSums},
    {"sparse_attention", "", "", "attention is dense"},
    {"sparse_gradients", "", "", kFloatSums},
    {"tensor_parallel", "autotp_size", "1", "experts are split over ranks, matrices are not"},
    {"tensorboard", "enabled", "", "--tensorboard-dir DIR does it"},
    {"torch_autocast", "enabled", "", "bf16 or fp16 is what there is"},
    {"wandb", "enabled", "", kInMetrics},
    {"zero_optimization", "stage", "", "its key 'stage' is what there is"},
    {"zero_optimization.zero_quantized_gradients", "", "", kFloatSums},
    {"zero_optimization.zero_quantized_weights", "", "", "weights travel whole"},
    {"bf16.bf16_master_weights_and_grads", "", "", "master weights are f32"},
    {"bf16.bf16_optimizer_states", "", "", "optimiser state is f32"},
    {"fp16.auto_cast", "", "", "inputs are bytes"},
    {"fp16.consecutive_hysteresis", "", "", "--hysteresis counts all overflows"},
    {"fp16.fp16_master_weights_and_grads", "", "", "master weights are f32"},
    {"optimizer.params.amsgrad", "", "", "the optimiser is AdamW as published"},
    {"scheduler.params.last_batch_iteration", "", "-1", "a run starts at its first step"},
};

// Sections that change memory and speed alone: a warning reports that what they turn on is not done
// here. Their rows above take precedence.
constexpr const char* kMemoryBlocks[] = {"activation_checkpointing", "zero_optimization"};

// Keys of which no value changes what is trained or shown.
constexpr const char* kNothing[] = {
    "activation_checkpointing",  // all but kRecompute
    "aio",
    "compile",
    "dataloader_drop_last",
    "disable_allgather",
    "dump_state",
    "graph_harvesting",
    "memory_breakdown",
    "optimizer.legacy_fusion",
    "optimizer.params.foreach",
    "optimizer.params.fused",
    "optimizer.params.torch_adam",
    "timers",
    "wall_clock_breakdown",
    "zero_allow_untested_optimizer",
    "zero_force_ds_cpu_optimizer",
    "zero_optimization.offload_optimizer",  // all but the device and its path
};

// "zero_optimization.stage" is in "zero_optimization".
bool IsIn(absl::string_view path, absl::string_view section) {
  return absl::ConsumePrefix(&path, section) && (path.empty() || path[0] == '.');
}

bool IsAuto(const JsonLeaf& leaf) {
  return leaf.type == JsonType::kString && leaf.text == "auto";
}

bool IsAbsent(const JsonLeaf& leaf) {
  return leaf.type == JsonType::kNull || leaf.type == JsonType::kEmptyList ||
         leaf.type == JsonType::kEmptyObject;
}

// Whether the value leaves off what it could turn on.
bool IsOff(const JsonLeaf& leaf, absl::string_view neutral) {
  if (IsAbsent(leaf) || leaf.text == "false" || leaf.text == "none" || IsAuto(leaf)) return true;
  if (!neutral.empty() && leaf.text == neutral) return true;
  double value = 0, other = 0;
  (void)absl::SimpleAtod(neutral, &other);
  return leaf.type == JsonType::kNumber && absl::SimpleAtod(leaf.text, &value) && value == other;
}

class DeepSpeed {
 public:
  DeepSpeed(const std::string& file, Settings& settings, std::vector<std::string>& refused,
            std::vector<std::string>& warnings)
      : file_(file), settings_(settings), refused_(refused), warnings_(warnings) {}

  // Whether the leaf is DeepSpeed's; remembers it.
  bool Take(const JsonLeaf& leaf) {
    if (IsHere(leaf.path)) {
      if (IsAuto(leaf)) auto_.insert(leaf.path);
      if (!IsAuto(leaf) && !IsAbsent(leaf)) leaf_[leaf.path] = leaf;
      return true;
    }
    const std::vector<std::string> keys = DeepSpeedKeys();
    const bool section = std::any_of(keys.begin(), keys.end(),
                                     [&](const std::string& key) { return IsIn(key, leaf.path); });
    if (section && (IsAuto(leaf) || IsAbsent(leaf))) return true;
    const bool nothing = std::any_of(std::begin(kNothing), std::end(kNothing),
                                     [&](const char* key) { return IsIn(leaf.path, key); });
    if (nothing) return true;
    if (!IsElsewhere(leaf) && !IsOfMemory(leaf)) return false;
    others_.push_back(leaf);
    return true;
  }

  void Apply() {
    RefuseOthers();
    ApplyOffload();
    ApplyRecompute();
    WarnOfMemory();
    ApplyTypes();
    // A schedule's own peak takes precedence over the optimiser's rate.
    if (Has(kPeak)) leaf_.erase(kRate);
    for (const SameMeaning& s : kSame) {
      if (Has(s.key) && InUse(s.key)) Set(s.setting, leaf_[s.key].text, s.key);
    }
    if (Has("optimizer.params.betas.0") != Has("optimizer.params.betas.1")) {
      Wrong("optimizer.params.betas", "one number", "two");
    }
    ApplyOptimizer();
    const bool scheduler = std::any_of(leaf_.begin(), leaf_.end(), [](const auto& entry) {
      return absl::StartsWith(entry.first, "scheduler.");
    });
    if (scheduler) ApplyScheduler();
  }

 private:
  static bool IsHere(const std::string& path) {
    const std::vector<std::string> keys = DeepSpeedKeys();
    return std::find(keys.begin(), keys.end(), path) != keys.end();
  }
  static bool IsElsewhere(const JsonLeaf& leaf) {
    return std::any_of(std::begin(kElsewhere), std::end(kElsewhere),
                       [&](const Elsewhere& row) { return IsIn(leaf.path, row.key); });
  }
  static bool TurnsOn(const Elsewhere& row, const JsonLeaf& leaf) {
    const std::string by = *row.by == 0 ? row.key : absl::StrCat(row.key, ".", row.by);
    return (IsIn(leaf.path, by) || leaf.path == row.key) && !IsOff(leaf, row.neutral);
  }
  static bool IsRefused(const JsonLeaf& leaf) {
    return std::any_of(std::begin(kElsewhere), std::end(kElsewhere),
                       [&](const Elsewhere& row) { return TurnsOn(row, leaf); });
  }
  static bool IsOfMemory(const JsonLeaf& leaf) {
    return std::any_of(std::begin(kMemoryBlocks), std::end(kMemoryBlocks),
                       [&](const char* section) { return IsIn(leaf.path, section); });
  }
  bool Has(const char* key) const { return leaf_.count(key) != 0; }
  bool IsLeftOpen(const char* key) const { return auto_.count(key) != 0; }
  std::string Text(const char* key, const char* fallback) const {
    const auto it = leaf_.find(key);
    return it == leaf_.end() ? fallback : it->second.text;
  }
  bool IsFloat16() const { return Text("fp16.enabled", "false") == "true"; }
  bool InUse(absl::string_view key) const { return IsFloat16() || !absl::StartsWith(key, "fp16."); }

  void Wrong(absl::string_view key, absl::string_view value, absl::string_view expected) {
    refused_.push_back(absl::StrCat(key, " is ", Shown(value), ", expected ", expected));
  }

  void Set(const char* setting, std::string text, absl::string_view key) {
    const Setting* const found = settings_.Find(setting);
    if (found == nullptr) {
      refused_.push_back(
          absl::StrCat(key, " has no meaning for this command, which has no --", setting));
      return;
    }
    const std::string where = absl::StrCat(file_, ": ", key);
    const absl::Status status =
        settings_.Set(*found, {WholeText(std::move(text), *found)}, Origin::kFile, where);
    if (status.ok()) return;
    refused_.emplace_back(absl::StripPrefix(status.message(), absl::StrCat(file_, ": ")));
  }

  // Where state is not offloaded, its device is a key of memory like others.
  void ApplyOffload() {
    const std::string device = Text(kOffloadDevice, "none");
    if (device == "none") return;
    if (device != "cpu" && device != "nvme") {
      return Wrong(kOffloadDevice, device, "none, cpu or nvme");
    }
    if (settings_.Find("offload") == nullptr || settings_.is("device", "cuda")) {
      others_.push_back(leaf_[kOffloadDevice]);
    } else if (device == "cpu") {
      Set("offload", "optimizer", kOffloadDevice);
    } else if (Has(kOffloadPath)) {
      Set("offload", absl::StrCat("optimizer:file=", leaf_[kOffloadPath].text), kOffloadPath);
    } else {
      Wrong(kOffloadPath, "missing", "a folder");
    }
  }

  void ApplyRecompute() {
    for (const char* key : kRecompute) {
      if (!Has(key) || IsOff(leaf_[key], "0")) continue;
      if (settings_.Find("recompute") != nullptr) return Set("recompute", "layer", key);
      others_.push_back(leaf_[key]);
    }
  }

  // Each section and key once.
  void RefuseOthers() {
    for (const Elsewhere& row : kElsewhere) {
      const auto on = std::find_if(others_.begin(), others_.end(),
                                   [&](const JsonLeaf& leaf) { return TurnsOn(row, leaf); });
      if (on == others_.end() || !InUse(row.key)) continue;
      refused_.push_back(absl::StrCat("DeepSpeed's key '", Shown(on->path),
                                      "' is not supported; remove it: ", row.why));
    }
  }

  // "zero_optimization.offload_optimizer", whatever it holds.
  static std::string MemoryKey(const std::string& path) {
    const size_t dot = path.find('.', path.find('.') + 1);
    return path.substr(0, dot);
  }

  void WarnOfMemory() {
    std::vector<std::string> keys;
    const auto has_no_device = [&](const std::string& key) {
      return std::any_of(others_.begin(), others_.end(), [&](const JsonLeaf& leaf) {
        return leaf.path == key + ".device" && IsOff(leaf, "");
      });
    };
    for (const JsonLeaf& leaf : others_) {
      const std::string key = MemoryKey(leaf.path);
      const bool listed = !keys.empty() && keys.back() == key;
      if (listed || !IsOfMemory(leaf) || IsRefused(leaf) || IsOff(leaf, "")) continue;
      if (!has_no_device(key)) keys.push_back(key);
    }
    if (keys.empty()) return;
    warnings_.push_back(
        absl::StrCat(file_, ": ", kMemoryAlone, Shown(absl::StrJoin(keys, ", "), 1000)));
  }

  void ApplyTypes() {
    for (const char* key : {"fp16.enabled", "bf16.enabled"}) {
      if (Has(key) && leaf_[key].type != JsonType::kBool) {
        Wrong(key, Text(key, ""), "true, false or \"auto\"");
        leaf_.erase(key);
      }
    }
    const bool bf16 = Text("bf16.enabled", "false") == "true";
    if (IsFloat16() && bf16) return Wrong("fp16.enabled", "true", "false beside bf16.enabled");
    if (IsFloat16()) {
      Set("dtype", "f16", "fp16.enabled");
      ApplyScalePower();
    } else if (Has("bf16.enabled") && (bf16 || !IsLeftOpen("fp16.enabled"))) {
      Set("dtype", bf16 ? "bf16" : "f32", "bf16.enabled");
    }
  }

  void ApplyScalePower() {
    constexpr char kPower[] = "fp16.initial_scale_power";
    if (!Has(kPower)) return;
    int power = 0;
    if (!absl::SimpleAtoi(Text(kPower, ""), &power)) {
      return Wrong(kPower, Text(kPower, ""), "an integer");
    }
    Set("initial-loss-scale", absl::StrFormat("%.17g", std::ldexp(1.0, power)), kPower);
  }

  // DeepSpeed's Adam decouples weight decay too, unless adam_w_mode is false.
  void ApplyOptimizer() {
    const std::string type = Text("optimizer.type", "AdamW");
    if (type != "AdamW" && type != "Adam") Wrong("optimizer.type", type, "AdamW");
    if (type == "Adam") RefuseFalse("optimizer.params.adam_w_mode");
    RefuseFalse("optimizer.params.bias_correction");
  }

  void RefuseFalse(const char* key) {
    if (Text(key, "true") == "false") Wrong(key, "false", "true");
  }

  void ApplyScheduler() {
    const std::string type = Text("scheduler.type", "missing");
    const bool cosine = type == "WarmupCosineLR";
    const bool linear = type == "WarmupDecayLR";
    if (!cosine && !linear && type != "WarmupLR") {
      return Wrong("scheduler.type", type, "WarmupLR, WarmupDecayLR or WarmupCosineLR");
    }
    Set("lr-decay-style", cosine ? "cosine" : linear ? "linear" : "constant", "scheduler.type");
    for (const char* key :
         {"scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"}) {
      double value = 0;
      if (!absl::SimpleAtod(Text(key, "0"), &value) || value != 0) Wrong(key, Text(key, ""), "0");
    }
    if (!IsLeftOpen(kWarmup)) Set("lr-warmup-steps", Text(kWarmup, cosine ? "2" : "1000"), kWarmup);
    CheckWarmupShape();
    if (cosine) ApplyCosineMinimum();
    if (!cosine) Require(kPeak, "the rate after the warm-up", "lr");
    if (linear) Set("min-lr", "0", "scheduler.type");
    constexpr char kTotal[] = "scheduler.params.total_num_steps";
    if (cosine || linear) return Require(kTotal, "the steps of the schedule", "lr-decay-steps");
    for (const char* key : {"scheduler.params.cos_min_ratio", kTotal}) {
      if (Has(key)) Wrong(key, "given", "it where the rate decays only");
    }
  }

  // DeepSpeed's own default is "log", which a warm-up of one step does not differ from. Steps that
  // are left open are those of a template, which trainers fill in.
  void CheckWarmupShape() {
    constexpr char kShape[] = "scheduler.params.warmup_type";
    const std::string shape = Text(kShape, "missing");
    const bool one =
        settings_.Find("lr-warmup-steps") != nullptr && settings_.integer("lr-warmup-steps") <= 1;
    if (shape == "linear" || IsLeftOpen(kShape) || one) return;
    if (shape != "missing" || !IsLeftOpen(kWarmup)) return Wrong(kShape, shape, "\"linear\"");
    warnings_.push_back(
        absl::StrCat(file_, ": ", kShape, " is missing: linear here, logarithmic in DeepSpeed"));
  }

  // Sets what a schedule cannot do without.
  void Require(const char* key, const char* what, const char* setting) {
    if (IsLeftOpen(key)) return;
    if (!Has(key)) return Wrong(key, "missing", what);
    Set(setting, Text(key, ""), key);
  }

  void ApplyCosineMinimum() {
    constexpr char kRatio[] = "scheduler.params.cos_min_ratio";
    const bool open = IsLeftOpen(kRate) && settings_.Find("lr") != nullptr;
    double lr = open ? settings_.real("lr") : 0;
    double ratio = 0;
    if (!open && !absl::SimpleAtod(Text(kRate, ""), &lr)) {
      return Wrong(kRate, Text(kRate, "missing"), "the peak of the schedule");
    }
    if (!absl::SimpleAtod(Text(kRatio, "0.0001"), &ratio)) {
      return Wrong(kRatio, Text(kRatio, ""), "a number");
    }
    Set("min-lr", absl::StrCat(ratio * lr), kRatio);
  }

  const std::string file_;
  Settings& settings_;
  std::vector<std::string>& refused_;
  std::vector<std::string>& warnings_;
  std::map<std::string, JsonLeaf> leaf_;  // with a value
  std::set<std::string, std::less<>> auto_;
  std::vector<JsonLeaf> others_;  // below kElsewhere and kMemoryBlocks
};

}  // namespace

std::vector<std::string> DeepSpeedKeys() {
  std::vector<std::string> keys;
  for (const SameMeaning& s : kSame) keys.emplace_back(s.key);
  keys.insert(keys.end(), std::begin(kSpecial), std::end(kSpecial));
  keys.insert(keys.end(), std::begin(kRecompute), std::end(kRecompute));
  return keys;
}

void TakeDeepSpeedKeys(const std::string& file, std::vector<JsonLeaf>& leaves, Settings& settings,
                       std::vector<std::string>& refused, std::vector<std::string>& warnings) {
  DeepSpeed keys(file, settings, refused, warnings);
  std::vector<JsonLeaf> others;
  for (JsonLeaf& leaf : leaves) {
    // The former name of bf16.
    if (IsIn(leaf.path, "bfloat16")) leaf.path.replace(0, sizeof("bfloat16") - 1, "bf16");
    if (!keys.Take(leaf)) others.push_back(leaf);
  }
  leaves = std::move(others);
  keys.Apply();
}

}  // namespace moe::cli
