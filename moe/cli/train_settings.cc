#include "moe/cli/train_settings.h"

#include <absl/strings/str_cat.h>

#include "moe/cli/common_settings.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/trace_file.h"
#include "moe/lm/trainer.h"

namespace moe::cli {
namespace {

using Table = std::vector<Setting>;

// Defaults stand in TrainConfig; only what has none there stands here.
const lm::TrainConfig& Defaults() {
  static const lm::TrainConfig config;
  return config;
}

constexpr int64_t kMostBucketMib = int64_t{1} << 20;

template <typename T>
std::string Text(T value) {
  return absl::StrCat(value);
}

void AddData(Table& table) {
  const char* const kGroup = "Data and steps";
  const lm::TrainConfig& d = Defaults();
  table.insert(
      table.end(),
      {{kGroup, "data", "", 0, Kind::kPaths, "PATH", "",
        "text file, or folder read in name order without symbolic links and files with NUL bytes; "
        "repeatable; needed"},
       {kGroup, "out", "", 0, Kind::kText, "DIR", "",
        "folder for metrics.jsonl, made if it is not there; without it no file is written"},
       {kGroup, "steps", "", 0, Kind::kInteger, "N", Text(d.steps), "optimiser steps"},
       {kGroup, "seq-length", "", 0, Kind::kInteger, "N", Text(d.sequence_length),
        "bytes a sequence predicts"},
       {kGroup, "micro-batch-size", "", 0, Kind::kInteger, "N", Text(d.micro_batch_size),
        "sequences of a micro-batch"},
       {kGroup, "micro-batches", "", 0, Kind::kInteger, "M", Text(d.micro_batches),
        "micro-batches of a step, over all ranks; ranks need not divide it"},
       {kGroup, "train-batch-size", "", 0, Kind::kInteger, "N", "",
        "sequences of a step = micro-batch-size x M; sets the one of them that is not given"},
       {kGroup, "gradient-accumulation-steps", "", 0, Kind::kInteger, "N", "",
        "micro-batches of a rank: M = N x ranks"},
       {kGroup, "eval-interval", "", 0, Kind::kInteger, "N", Text(d.eval_interval),
        "steps between passes over held-out text; 0 = before and after training only"},
       {kGroup, "eval-sequences", "", 0, Kind::kInteger, "N", Text(d.eval_sequences),
        "most held-out sequences of a pass"},
       {kGroup, "verify-replicas", "", 0, Kind::kInteger, "N", Text(d.verify_replicas),
        "steps between comparisons of the weights that several ranks hold; 0 = at the end only"},
       {kGroup, "seed", "", 0, Kind::kSeed, "N", Text(d.seed),
        "of initial weights and the order of sequences"}});
}

void AddModel(Table& table) {
  const char* const kGroup = "Model";
  const lm::TransformerConfig& d = Defaults().model;
  table.insert(
      table.end(),
      {{kGroup, "num-layers", "", 0, Kind::kInteger, "N", Text(d.num_layers), "transformer layers"},
       {kGroup, "num-attention-heads", "", 0, Kind::kInteger, "N", Text(d.num_attention_heads),
        "attention heads; 2 N divides H"},
       {kGroup, "moe-layer-freq", "", 0, Kind::kInteger, "N", Text(d.moe_layer_freq),
        "every N-th layer has experts; the others are dense, of width topk x F"},
       {kGroup,
        "dtype",
        "",
        0,
        Kind::kWord,
        "TYPE",
        NameOf(Defaults().dtype),
        "of activations and compute weights; sums, optimiser and master weights are f32",
        {"f32", "bf16", "f16"}}});
}

void AddParallel(Table& table) {
  const char* const kGroup = "Ranks";
  const lm::TrainConfig& d = Defaults();
  AddRankSettings(kGroup, table);
  AddShareDeviceSetting(kGroup, table);
  table.push_back(
      {kGroup, "expert-model-parallel-size", "ep", 0, Kind::kInteger, "N",
       Text(d.expert_parallel_size),
       "EP: ranks that share one set of experts; divides R; data-parallel size = R / EP"});
  AddThreadsSetting(kGroup, table);
  table.insert(
      table.end(),
      {{kGroup,
        "numerics",
        "",
        0,
        Kind::kWord,
        "NAME",
        "layout-invariant",
        "layout-invariant: the same bits at any number of ranks, split and transport; fast: sums "
        "of "
        "gradients in float32, half as much for all-reduce to move",
        {"fast", "layout-invariant"}},
       {kGroup,
        "dispatch",
        "",
        0,
        Kind::kWord,
        "NAME",
        "staged",
        "how tokens travel; direct reads peers' memory; hierarchical goes through one rank per "
        "node",
        {"staged", "direct", "hierarchical"}},
       {kGroup, "node-size", "", 0, Kind::kInteger, "N", Text(d.model.moe.dispatcher.node_size),
        "ranks that stand for one host with --dispatch hierarchical; divides EP; 0 = all of EP"},
       {kGroup, "moe-overlap-degree", "", 0, Kind::kInteger, "D", Text(d.model.moe.overlap_degree),
        "chunks of local experts, so that exchange and computation overlap; 1 = no overlap"},
       {kGroup,
        "all-reduce",
        "",
        0,
        Kind::kWord,
        "NAME",
        "ring",
        "of gradients; direct reads peers' memory (local only); library is MPI's or NCCL's own",
        {"ring", "direct", "library"}},
       {kGroup,
        "bucket-size-mb",
        "",
        0,
        Kind::kReal,
        "MiB",
        Text(d.bucket_bytes >> 20),
        "of gradients that travel together",
        {},
        false,
        kMostBucketMib},
       {kGroup,
        "grouped-gemm",
        "",
        0,
        Kind::kWord,
        "NAME",
        "auto",
        "with --device cuda: cublas, mma (this project's), or auto: dense 16-bit by cublas if "
        "--numerics is fast, the rest by mma",
        {"auto", "cublas", "mma", "wgmma"}}});
  AddTimeoutSetting(kGroup, table);
}

void AddOptimizer(Table& table) {
  const char* const kGroup = "Optimiser (AdamW)";
  const lm::TrainConfig& d = Defaults();
  table.insert(
      table.end(),
      {{kGroup, "lr", "", 0, Kind::kReal, "X", Text(d.schedule.peak), "peak learning rate"},
       {kGroup, "min-lr", "", 0, Kind::kReal, "X", Text(d.schedule.minimum),
        "learning rate at the end of the cosine"},
       {kGroup, "lr-warmup-steps", "", 0, Kind::kInteger, "N", Text(d.schedule.warmup_steps),
        "steps from 0 to lr, linearly"},
       {kGroup, "lr-decay-steps", "", 0, Kind::kInteger, "N", "",
        "step at which the cosine reaches min-lr; default: --steps"},
       {kGroup, "weight-decay", "", 0, Kind::kReal, "X", Text(d.optimizer.weight_decay),
        "decoupled; not for norms"},
       {kGroup, "clip-grad", "", 0, Kind::kReal, "X", Text(d.optimizer.clip_grad),
        "largest gradient norm, every expert counted once; 0 = off"},
       {kGroup, "adam-beta1", "", 0, Kind::kReal, "X", Text(d.optimizer.beta1),
        "decay of the mean gradient"},
       {kGroup, "adam-beta2", "", 0, Kind::kReal, "X", Text(d.optimizer.beta2),
        "decay of the mean squared gradient"},
       {kGroup, "adam-eps", "", 0, Kind::kReal, "X", Text(d.optimizer.epsilon),
        "added to the root of the mean squared gradient"},
       {kGroup, "loss-scale", "", 0, Kind::kReal, "X", Text(d.loss_scale.constant),
        "with --dtype f16: constant factor of the loss, a power of two; 0 = dynamic, by what "
        "follows"},
       {kGroup, "initial-loss-scale", "", 0, Kind::kReal, "X", Text(d.loss_scale.initial),
        "of the first step"},
       {kGroup, "min-loss-scale", "", 0, Kind::kReal, "X", Text(d.loss_scale.minimum),
        "where gradients that still overflow end the run"},
       {kGroup, "loss-scale-window", "", 0, Kind::kInteger, "N", Text(d.loss_scale.window),
        "steps without overflow before the scale doubles"},
       {kGroup, "hysteresis", "", 0, Kind::kInteger, "N", Text(d.loss_scale.hysteresis),
        "overflows before the scale is halved; a step that overflows is skipped on every rank"}});
}

void AddRecords(Table& table) {
  const char* const kGroup = "Profiling";
  AddTraceSetting(kGroup, "some steps", table);
  table.insert(table.end(),
               {{kGroup, "profile-step-start", "", 0, Kind::kInteger, "N", "1",
                 "first step of --trace, from 1"},
                {kGroup, "profile-step-end", "", 0, Kind::kInteger, "N", "",
                 "last step of --trace, which is written when it ends; default: 10 steps"},
                {kGroup, "record-routing", "", 0, Kind::kText, "FILE", "",
                 "slots of each rank for each expert, step by step, as moe bench --routing "
                 "trace:FILE replays them"}});
}

void AddOutput(Table& table) {
  const char* const kGroup = "Output and settings";
  table.insert(
      table.end(),
      {{kGroup, "log-interval", "", 0, Kind::kInteger, "N", Text(Defaults().log_interval),
        "steps between progress lines; on a terminal one line is refreshed every step"},
       {kGroup, "quiet", "", 'q', Kind::kSwitch, "", "", "no progress, only errors and the report"},
       {kGroup, "verbose", "", 'v', Kind::kSwitch, "", "",
        "name every file read, and a progress line for every step"}});
  AddColorSetting(kGroup, table);
  AddConfigSetting(kGroup, "settings by name, or DeepSpeed's keys where they mean the same", table);
  AddHelpSettings(kGroup, table);
}

}  // namespace

std::vector<Setting> TrainSettings() {
  Table table;
  AddData(table);
  const LayerDefaults layer = {
      .hidden_size = Defaults().model.hidden_size,
      .z_loss_coeff = static_cast<double>(Defaults().model.moe.router.z_loss_coeff)};
  AddModel(table);
  AddShapeSettings("Model", layer, table);
  AddRoutingSettings("Routing", layer, table);
  AddParallel(table);
  AddOptimizer(table);
  AddRecords(table);
  AddOutput(table);
  return table;
}

}  // namespace moe::cli
