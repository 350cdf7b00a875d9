// DeepSpeed's configuration keys, where they mean the same here.
#include <algorithm>
#include <cmath>
#include <map>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/types/span.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/config_file.h"

namespace moe::cli {
namespace {

struct SameMeaning {
  const char* key;
  const char* setting;
};

constexpr SameMeaning kSame[] = {
    {"train_micro_batch_size_per_gpu", "micro-batch-size"},
    {"gradient_clipping", "clip-grad"},
    {"steps_per_print", "log-interval"},
    {"optimizer.params.lr", "lr"},
    {"optimizer.params.betas.0", "adam-beta1"},
    {"optimizer.params.betas.1", "adam-beta2"},
    {"optimizer.params.eps", "adam-eps"},
    {"optimizer.params.weight_decay", "weight-decay"},
};

// Of no effect while fp16.enabled is false.
constexpr SameMeaning kLossScaling[] = {
    {"fp16.loss_scale", "loss-scale"},
    {"fp16.loss_scale_window", "loss-scale-window"},
    {"fp16.hysteresis", "hysteresis"},
    {"fp16.min_loss_scale", "min-loss-scale"},
};

constexpr const char* kSpecial[] = {
    "bf16.enabled",
    "fp16.enabled",
    "fp16.auto_cast",
    "fp16.initial_scale_power",
    "fp16.consecutive_hysteresis",
    "optimizer.type",
    "scheduler.type",
    "scheduler.params.warmup_type",
    "scheduler.params.warmup_num_steps",
    "scheduler.params.warmup_min_lr",
    "scheduler.params.warmup_max_lr",
    "scheduler.params.warmup_min_ratio",
    "scheduler.params.cos_min_ratio",
    "scheduler.params.total_num_steps",
};

// Sections of DeepSpeed without a counterpart here.
constexpr const char* kUnsupported[] = {
    "activation_checkpointing",
    "aio",
    "amp",
    "autotuning",
    "checkpoint",
    "comms_logger",
    "communication_data_type",
    "compression_training",
    "csv_monitor",
    "curriculum_learning",
    "data_efficiency",
    "data_types",
    "disable_allgather",
    "dump_state",
    "eigenvalue",
    "elasticity",
    "flops_profiler",
    "gradient_predivide_factor",
    "hybrid_engine",
    "memory_breakdown",
    "pipeline",
    "pld",
    "prescale_gradients",
    "progressive_layer_drop",
    "sparse_attention",
    "sparse_gradients",
    "tensorboard",
    "wall_clock_breakdown",
    "wandb",
    "zero_allow_untested_optimizer",
    "zero_optimization",
};

class DeepSpeed {
 public:
  DeepSpeed(const std::string& file, Settings& settings) : file_(file), settings_(settings) {}

  // Whether the leaf is DeepSpeed's; remembers it.
  bool Take(const JsonLeaf& leaf) {
    const auto among = [&](absl::Span<const SameMeaning> list) {
      return std::any_of(list.begin(), list.end(),
                         [&](const SameMeaning& s) { return leaf.path == s.key; });
    };
    const bool ours = among(kSame) || among(kLossScaling) || Contains(kSpecial, leaf.path);
    if (ours) leaf_[leaf.path] = leaf;
    return ours;
  }

  absl::Status Apply() {
    MOE_RETURN_IF_ERROR(ApplyTypes());
    MOE_RETURN_IF_ERROR(ApplySame(kSame));
    if (Has("optimizer.params.betas.0") != Has("optimizer.params.betas.1")) {
      return Wrong("optimizer.params.betas", "one number", "two");
    }
    const bool scheduler = std::any_of(leaf_.begin(), leaf_.end(), [](const auto& entry) {
      return absl::StartsWith(entry.first, "scheduler.");
    });
    return scheduler ? ApplyScheduler() : absl::OkStatus();
  }

  template <size_t N>
  static bool Contains(const char* const (&keys)[N], const std::string& path) {
    return std::find(std::begin(keys), std::end(keys), path) != std::end(keys);
  }

 private:
  bool Has(const char* key) const { return leaf_.count(key) != 0; }
  std::string Text(const char* key, const char* fallback) const {
    const auto it = leaf_.find(key);
    return it == leaf_.end() ? fallback : it->second.text;
  }

  absl::Status Wrong(absl::string_view key, absl::string_view value,
                     absl::string_view expected) const {
    return absl::InvalidArgumentError(
        absl::StrCat(file_, ": ", key, " is ", value, ", expected ", expected));
  }

  absl::Status Set(const char* setting, std::string text, absl::string_view key) {
    const Setting* const found = settings_.Find(setting);
    if (found == nullptr) {
      return absl::InvalidArgumentError(absl::StrCat(
          file_, ": ", key, " has no meaning for this command, which has no --", setting));
    }
    return settings_.Set(*found, {std::move(text)}, Origin::kFile, absl::StrCat(file_, ": ", key));
  }

  absl::Status ApplySame(absl::Span<const SameMeaning> list) {
    for (const SameMeaning& s : list) {
      if (Has(s.key)) MOE_RETURN_IF_ERROR(Set(s.setting, leaf_[s.key].text, s.key));
    }
    return absl::OkStatus();
  }

  absl::Status ApplyTypes() {
    for (const char* key : {"fp16.enabled", "bf16.enabled"}) {
      if (Has(key) && leaf_[key].type != JsonType::kBool) {
        return Wrong(key, Text(key, ""), "true or false");
      }
    }
    const bool f16 = Text("fp16.enabled", "false") == "true";
    if (f16 && Text("bf16.enabled", "false") == "true") {
      return Wrong("fp16.enabled", "true", "false beside bf16.enabled");
    }
    if (f16) {
      MOE_RETURN_IF_ERROR(ApplyLossScaling());
    } else if (Has("bf16.enabled")) {
      const bool on = Text("bf16.enabled", "") == "true";
      MOE_RETURN_IF_ERROR(Set("dtype", on ? "bf16" : "f32", "bf16.enabled"));
    }
    // DeepSpeed's Adam decouples weight decay too, unless told not to.
    const std::string type = Text("optimizer.type", "AdamW");
    if (type != "AdamW" && type != "Adam") return Wrong("optimizer.type", type, "AdamW");
    return absl::OkStatus();
  }

  absl::Status ApplyLossScaling() {
    MOE_RETURN_IF_ERROR(Set("dtype", "f16", "fp16.enabled"));
    for (const char* key : {"fp16.auto_cast", "fp16.consecutive_hysteresis"}) {
      if (Text(key, "false") != "false") return Wrong(key, Text(key, ""), "false");
    }
    MOE_RETURN_IF_ERROR(ApplySame(kLossScaling));
    constexpr char kPower[] = "fp16.initial_scale_power";
    if (!Has(kPower)) return absl::OkStatus();
    int power = 0;
    if (!absl::SimpleAtoi(Text(kPower, ""), &power)) {
      return Wrong(kPower, Text(kPower, ""), "an integer");
    }
    return Set("initial-loss-scale", absl::StrFormat("%.17g", std::ldexp(1.0, power)), kPower);
  }

  absl::Status ApplyScheduler() {
    const std::string type = Text("scheduler.type", "missing");
    const bool cosine = type == "WarmupCosineLR";
    if (!cosine && type != "WarmupLR") {
      return Wrong("scheduler.type", type, "WarmupCosineLR or WarmupLR");
    }
    // DeepSpeed's own default is "log".
    const std::string shape = Text("scheduler.params.warmup_type", "missing");
    if (shape != "linear") return Wrong("scheduler.params.warmup_type", shape, "linear");
    for (const char* key :
         {"scheduler.params.warmup_min_lr", "scheduler.params.warmup_min_ratio"}) {
      double value = 0;
      if (!absl::SimpleAtod(Text(key, "0"), &value) || value != 0) {
        return Wrong(key, Text(key, ""), "0");
      }
    }
    constexpr char kSteps[] = "scheduler.params.warmup_num_steps";
    MOE_RETURN_IF_ERROR(Set("lr-warmup-steps", Text(kSteps, cosine ? "2" : "1000"), kSteps));
    return cosine ? ApplyCosine() : ApplyConstant();
  }

  absl::Status ApplyCosine() {
    constexpr char kTotal[] = "scheduler.params.total_num_steps";
    if (!Has(kTotal)) return Wrong(kTotal, "missing", "the steps of the schedule");
    MOE_RETURN_IF_ERROR(Set("lr-decay-steps", Text(kTotal, ""), kTotal));
    constexpr char kRatio[] = "scheduler.params.cos_min_ratio";
    double lr = 0;
    double ratio = 0;
    if (!absl::SimpleAtod(Text("optimizer.params.lr", ""), &lr)) {
      return Wrong("optimizer.params.lr", "missing", "the peak of the schedule");
    }
    if (!absl::SimpleAtod(Text(kRatio, "0.0001"), &ratio)) {
      return Wrong(kRatio, Text(kRatio, ""), "a number");
    }
    return Set("min-lr", absl::StrCat(ratio * lr), kRatio);
  }

  absl::Status ApplyConstant() {
    for (const char* key : {"scheduler.params.cos_min_ratio", "scheduler.params.total_num_steps"}) {
      if (Has(key)) return Wrong(key, "given", "it with WarmupCosineLR only");
    }
    constexpr char kMax[] = "scheduler.params.warmup_max_lr";
    if (!Has(kMax)) return Wrong(kMax, "missing", "the rate after the warm-up");
    MOE_RETURN_IF_ERROR(Set("lr", Text(kMax, ""), kMax));
    return Set("min-lr", Text(kMax, ""), kMax);
  }

  const std::string file_;
  Settings& settings_;
  std::map<std::string, JsonLeaf> leaf_;
};

}  // namespace

std::vector<std::string> DeepSpeedKeys() {
  std::vector<std::string> keys;
  for (const SameMeaning& s : kSame) keys.emplace_back(s.key);
  for (const SameMeaning& s : kLossScaling) keys.emplace_back(s.key);
  keys.insert(keys.end(), std::begin(kSpecial), std::end(kSpecial));
  return keys;
}

absl::Status TakeDeepSpeedKeys(const std::string& file, std::vector<JsonLeaf>& leaves,
                               Settings& settings) {
  DeepSpeed keys(file, settings);
  std::vector<JsonLeaf> others;
  for (const JsonLeaf& leaf : leaves) {
    const std::string section = leaf.path.substr(0, leaf.path.find('.'));
    if (DeepSpeed::Contains(kUnsupported, section)) {
      return absl::InvalidArgumentError(
          absl::StrCat(file, ": DeepSpeed's key '", leaf.path,
                       "' is not supported, expected a file without it"));
    }
    if (!keys.Take(leaf)) others.push_back(leaf);
  }
  leaves = std::move(others);
  return keys.Apply();
}

}  // namespace moe::cli
