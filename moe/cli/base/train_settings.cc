// The flags of `moe train` and its help.
#include "moe/lm/train_settings.h"

#include <cmath>
#include <limits>

#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/fault_settings.h"
#include "moe/cli/base/trace_file.h"
#include "moe/cli/base/train_options.h"
#include "moe/train/grid_unit.h"

namespace moe::cli {
namespace {

constexpr int64_t kMostBucketMib = int64_t{1} << 20;

void AddData(TrainOptions& options, const SettingRows& rows, Table& t) {
  t.Group("Data and steps");
  AddDataSettings(options.data, t);
  t.Add("--init-from DIR", &options.init_from,
        "start with the weights of a public model of the family mixtral, olmoe, qwen2_moe or "
        "qwen3_moe, or a dense one with --upcycle: config.json, which sets the model, and "
        "safetensors")
      .Roles(kOfOneRun | kByContent);
  t.Add("--upcycle E", Kind::kInteger,
        "with --init-from of a dense llama, mistral, qwen2 or qwen3: E experts a layer, copies of "
        "its network, and new routers (docs/checkpoint.md)")
      .Within(1, 4096, "1 to 4096")
      .Roles(kOfOneRun);
  t.Add("--upcycle-noise X", {Kind::kReal, "0"},
        "standard deviation of what is added to each weight of each copy, by --seed")
      .Least(0)
      .Roles(kOfOneRun);
  t.Add("--tokenizer FILE", &options.tokenizer,
        "tokenizer.json that made the ids of --tokens: it is kept in the folder of --save, where "
        "moe generate, eval and ckpt export find it; default: that of --init-from")
      .Roles(kOfOneRun | kPerRank);
  t.Add("--out DIR", &options.out,
        "folder for metrics.jsonl, made if it is not there; one that holds a run is refused; "
        "without it no file is written")
      .Roles(kOfOneRun | kPerRank);
  t.Add("--tensorboard-dir DIR", &options.tensorboard_dir,
        "folder for TensorBoard's event files, a point of each curve for every step; made if it is "
        "not there; one that holds a run is refused (docs/curves.md)")
      .Roles(kOfOneRun | kPerRank);
  t.Add("--metrics-file FILE", &options.metrics_file,
        "the last step's numbers as Prometheus reads them, replaced at most once a second")
      .Roles(kOfOneRun | kPerRank);
  t.Add("--steps, --train-iters N", rows, "optimiser steps");
  t.Add("--seq-length N", rows, "bytes or tokens a sequence predicts");
  // These four together: ResolveBatch.
  t.Add("--micro-batch-size N", rows, "sequences of a micro-batch").Least(1);
  t.Add("--micro-batches M", rows,
        "micro-batches of a step, over all ranks; ranks need not divide it")
      .Least(1);
  t.Add("--train-batch-size, --global-batch-size N", Kind::kInteger,
        "sequences of a step = micro-batch-size x M; sets the one of them that is not given")
      .Least(1);
  t.Add("--gradient-accumulation-steps N", Kind::kInteger, "micro-batches of a rank: M = N x ranks")
      .Least(1);
  t.Add("--eval-interval N", rows,
        "steps between passes over held-out text; 0 = before and after training only")
      .Least(0)
      .Roles(kOfOneRun);
  t.Add("--eval-sequences N", rows, "most held-out sequences of a pass");
  t.Add("--verify-replicas N", rows,
        "steps between comparisons of the weights that several ranks hold; 0 = at the end only")
      .Roles(kOfOneRun);
  t.Add("--seed N", rows, "of initial weights and the order of sequences").Roles(kOfLayer);
}

void AddModel(lm::TransformerConfig& model, const SettingRows& rows, Table& t) {
  t.Group("Model");
  t.Add("--vocab-size N", rows, "token ids; at least 256 with --data: bytes").Least(1);
  t.Add("--num-layers N", rows, "transformer layers");
  t.Add("--num-attention-heads N", rows,
        "attention heads; 2 N divides H, or --kv-channels says their width");
  t.Add("--num-query-groups, --num-key-value-heads N", rows,
        "heads of keys and values, each for as many of queries; 0 = --num-attention-heads")
      .Least(0);
  t.Add("--kv-channels, --head-dim N", rows, "width of a head, even; 0 = H / --num-attention-heads")
      .Least(0);
  t.Add("--add-qkv-bias", rows, "biases of queries, keys and values");
  t.Add("--qk-layernorm NAME", rows,
        "RMSNorm of queries and keys: head = each head by itself, heads = all heads of a token "
        "together")
      .Alone("head");
  t.Add("--tie-word-embeddings", rows, "the output layer's weights are the embedding's")
      .Shorthand("untie-embeddings-and-output-weights", "false");
  t.Add("--rotary-base, --rope-theta X", rows, "of the angles of positions");
  t.Add("--norm-epsilon, --rms-norm-eps X", rows, "of every RMSNorm");
  t.Add("--init-method-std X", FormOf(rows["init_std"]),
        "standard deviation of initial weights; of output projections over sqrt(2 layers)")
      .Above(0);
  t.Add("--max-position-embeddings N", rows,
        "longest sequence of exports, where it is more than --seq-length")
      .Least(0)
      .Roles(kOfOneRun);
  t.Add("--bos-token-id ID", rows, "that begins a text, of exports").Roles(kOfOneRun);
  t.Add("--eos-token-id IDS", Kind::kText,
        "that end a document or text, between commas: of what follows, of exports, and where moe "
        "generate stops");
  t.Add("--reset-position-ids", rows, "positions begin at 0 behind the end of a document");
  t.Add("--reset-attention-mask", rows, "tokens attend to their own document alone");
  t.Add("--eod-mask-loss", rows, "the end of a document has no loss, and does not count in means");
  t.Add("--moe-layer-freq N", rows, "every N-th layer has experts; the others are dense");
  t.Add("--dense-ffn-hidden-size N", FormOf(rows["dense_ffn_hidden_size"]),
        "width of dense layers; 0 = topk x F")
      .Least(0);
  t.Add("--dtype TYPE", rows,
        "of activations and compute weights; sums, optimiser and master weights are f32")
      .Shorthand("bf16", "bf16")
      .Shorthand("fp16", "f16")
      .Roles(kOfLayer);
  model.moe.router.hidden_size = model.hidden_size;
  model.moe.router.num_experts = 8;
  model.moe.router.aux_loss_coeff = 0.01f;
  model.moe.ffn_hidden_size = 256;
  AddShapeSettings(model.moe, t);
  t.Group("Routing", kOfLayer);
  AddRoutingSettings(model.moe, t);
}

void AddParallel(TrainOptions& options, const SettingRows& rows, Table& t) {
  lm::TrainConfig& train = options.train;
  t.Group("Ranks");
  AddLayoutSettings(train, t);
  t.Add("--mesh WORD", {Kind::kWord, "given", {"given", "auto"}},
        "auto: EP, ETP, PP, TP, schedule, chunks, ZeRO and recomputation that moe plan predicts to "
        "be fastest of those that fit; what is given by its own flag stays; the same bits at any")
      .Roles(kOfOneRun);
  t.Add("--pipeline-layout N,N,...", Kind::kText,
        "layers of each stage, with --vp of each part, in the order in which rows pass them; "
        "default: as even as they can be; the same bits");
  t.Add("--numerics NAME", rows,
        "layout-invariant: the same bits at any number of ranks, split and transport; fast: sums "
        "of gradients in float32, half as much for all-reduce to move");
  t.Add("--tensor-model-parallel-size, --tp N", rows,
        "TP: ranks that share matrices of attention, dense and shared networks and output layer; "
        "at most --tensor-leaves; divides EP times ETP; the same bits")
      .Roles(kOfLayer);
  t.Add("--expert-tensor-parallel-size, --etp N", rows,
        "ETP: ranks that share the matrices of experts; at most --tensor-leaves; EP times ETP "
        "divides the ranks of a stage; the same bits")
      .Roles(kOfLayer);
  t.Add("--tensor-leaves S", {Kind::kWord, "1", {"1", "2", "4", "8", "16"}},
        "leaves of products that are balanced trees (docs/architecture.md); part of what fixes the "
        "bits; 1 = chains")
      .Roles(kOfLayer);
  AddBFloat16OrderSetting(train.trainer.session.bfloat16_order, t);
  t.Add("--grid-unit-log2 N", rows,
        "log2 of the unit of layout-invariant sums of gradients; part of what fixes the bits; "
        "default: from the gradients, -50 where that does")
      .Within(-kMostGridUnitLog2, -2, "-300 to -2");
  t.Add("--moe-overlap-degree D", rows,
        "chunks of local experts, so that exchange and computation overlap; 1 = no overlap")
      .Roles(kOfLayer);
  t.Add("--all-reduce NAME", rows,
        "of gradients; direct reads peers' memory (local only); library is MPI's or NCCL's own");
  t.Add("--zero STAGE", rows,
        "state that ranks share out: 1 = optimiser's, 2 = and sums of gradients, 3 = and weights; "
        "same bits at any")
      .Shorthand("use-distributed-optimizer", "1");
  t.Add(
       "--offload WHAT", {Kind::kText, "none"},
       "out of the memory of the device that computes: optimizer = optimiser state, to the host's; "
       "optimizer:file=DIR = to a scratch file of each rank in DIR, an existing folder; the same "
       "bits at any (docs/parallelism.md); with --device cpu")
      .Roles(kPerRank);  // a rank's own DIR; the ranks compare the rest (lm::Train)
  t.Add("--recompute WHAT", rows,
        "computed again before its backward: activations = outputs of norms and activation "
        "functions, for little work; layer = each layer, which keeps its input alone, for a "
        "forward more; the same bits, for less memory");
  t.Add("--bucket-size-mb MiB", {Kind::kReal, absl::StrCat(train.trainer.bucket_bytes >> 20)},
        "of gradients that travel together")
      .Most(kMostBucketMib)
      .Within(0x1p-20, kMostBucketMib, "at least 1e-6, a byte");
  t.Add("--grouped-gemm NAME", {Kind::kWord, "auto", {"auto", "cublas", "mma", "wgmma"}},
        "with --device cuda: cublas, mma (this project's), or auto: dense 16-bit by cublas if "
        "--numerics is fast, the rest by mma");
  AddTimeoutSetting(t);
}

void AddOptimizer(const SettingRows& rows, Table& t) {
  const double below_one = std::nextafter(1.0, 0.0);
  t.Group("Optimiser (AdamW)");
  t.Add("--lr X", rows, "peak learning rate");
  t.Add("--min-lr X", rows, "learning rate that the decay goes down to");
  t.Add("--lr-warmup-steps, --lr-warmup-iters N", rows, "steps up to lr, linearly").Least(0);
  t.Add("--lr-decay-steps, --lr-decay-iters N", Kind::kInteger,
        "step after which the decay is at min-lr; default: --steps")
      .Least(1);
  t.Add("--lr-decay-style NAME", rows, "of the way from lr to min-lr; constant stays at lr");
  t.Add("--weight-decay X", rows, "decoupled; not for norms").Least(0);
  t.Add("--clip-grad X", rows, "largest gradient norm, every expert counted once; 0 = off")
      .Least(0);
  t.Add("--adam-beta1 X", rows, "decay of the mean gradient").Within(0, below_one, "0 <= beta < 1");
  t.Add("--adam-beta2 X", rows, "decay of the mean squared gradient")
      .Within(0, below_one, "0 <= beta < 1");
  t.Add("--adam-eps X", rows, "added to the root of the mean squared gradient")
      .Within(std::numeric_limits<float>::min(), std::numeric_limits<float>::max(),
              "at least 1.2e-38: 0 / 0 of a gradient of 0 is NaN");
  t.Add("--loss-scale X", rows,
        "with --dtype f16: constant factor of the loss, a power of two; 0 = dynamic, by what "
        "follows");
  t.Add("--initial-loss-scale X", rows, "of the first step");
  t.Add("--min-loss-scale X", rows, "where gradients that still overflow end the run");
  t.Add("--loss-scale-window N", rows, "steps without overflow before the scale doubles");
  t.Add("--hysteresis N", rows,
        "overflows before the scale is halved; a step that overflows is skipped on every rank");
}

void AddRecords(TrainOptions& options, Table& t) {
  t.Group("Profiling", kOfOneRun);
  AddTraceSetting("some steps", t);
  t.Add("--profile-step-start N", {Kind::kInteger, "1"}, "first step of --trace, from 1");
  t.Add("--profile-step-end N", Kind::kInteger,
        "last step of --trace, which is written when it ends; default: 10 steps");
  t.Add("--record-routing FILE", &options.record_routing,
        "slots of each rank for each expert, step by step, as moe bench --routing trace:FILE "
        "replays them")
      .Roles(kPerRank);  // given on all or none: lm::Train
  t.Add("--dry-run", Kind::kSwitch,
        "print the memory that a rank will use, and stop; exit code 5 if there is too little here")
      .FlagOnly()
      .Roles(kOfOneRun | kPerRank);
}

void AddFailures(TrainOptions& options, Table& t) {
  t.Group("Failures", kOfOneRun | kPerRank);
  t.Add("--flight-dir DIR", &options.flight_dir,
        "folder for flight.rank<R>.jsonl, the last 2048 collectives of each rank, written at the "
        "end, on a failure and on SIGUSR2; without it on the last two, to --save "
        "(docs/reliability.md)");
  AddFaultSettings(t);
}

constexpr Choice<bool> kOnOff[] = {{"on", true}, {"off", false}};

void AddCheckpoints(lm::TrainCheckpoints& checkpoints, const SettingRows& rows, Table& t) {
  t.Group("Checkpoints", kOfOneRun);
  t.Add("--save DIR", rows,
        "folder for checkpoints, DIR/step-00000120 and so on: one that all ranks see, and that no "
        "other run has; SIGTERM, SIGHUP, SIGUSR1 or SIGINT then saves and ends the run, a second "
        "one but SIGUSR1 at once")
      .Roles(kOneFolder);
  t.Add("--save-interval N", rows,
        "steps between checkpoints; 0 = at the end, and when asked to stop")
      .Least(0);
  t.Add("--checkpoint-keep N", rows, "newest checkpoints that stay").Least(1);
  t.Add("--checkpoint-keep-every N", rows, "those of steps that N divides stay, too; 0 = none")
      .Least(0);
  t.Add("--checkpoint-async WORD", {&checkpoints.asynchronous, kOnOff},
        "on: steps go on while a checkpoint is written")
      .Shorthand("async-save", "on");
  t.Add("--checkpoint-failures N", rows, "writes that fail in a row until the run ends").Least(1);
  t.Add("--checkpoint-timeout SECONDS", &checkpoints.timeout,
        "a write, fsync or other call on --save that does not return for so long ends the run "
        "(exit 8); a line a minute says where it hangs")
      .Most(kMostSeconds)
      .Above(0);
  t.Add("--resume WHERE", {Kind::kText, "none"},
        "auto: from the newest readable checkpoint in --save, or from the beginning if none is "
        "there, readable or not; the folder of a checkpoint: from it; at any number of ranks and "
        "any EP; --bf16-order auto is then the checkpoint's");
  t.Add("--allow-numerics-change", rows,
        "resume although the steps to come have other bits, as with another --dtype");
}

void AddOutput(TrainOptions& options, Table& t) {
  t.Group("Output and settings", kOfOneRun);
  t.Add("--log-interval N", &options.log_interval,
        "steps between progress lines; on a terminal one line is refreshed every step")
      .Least(1)
      .Roles(kPerRank);
  t.Add("-o, --output FORM", {Kind::kWord, "table", {"table", "json"}},
        "of the end report: tables, or one JSON object on a line")
      .Roles(kPerRank);
  AddQuietSetting("no progress, only errors and the report", t);
  t.Add("-v, --verbose", Kind::kSwitch, "name every file read, and a progress line for every step")
      .Roles(kPerRank);
  AddConfigSetting("settings by name, or DeepSpeed's keys where they mean the same", t);
  AddHelpSettings(t);
}

constexpr char kHead[] =
    R"(usage: moe train --data PATH [flags]
       moe train --tokens FILE --vocab-size N [flags]

Trains a mixture-of-experts language model on the bytes of text files or on token ids made
elsewhere, expert-parallel x data-parallel, on threads of this process or, under mpirun, on
processes. Every 20th block of 16,384 bytes (ids) is held out and measured before and after.

  moe train --data /usr/share/games/fortunes --ranks 4 --ep 2 --num-experts 8 --topk 2
  mpirun -n 4 moe train --data book.txt --ep 4 --out run
)";

constexpr char kTail[] =
    R"(
Settings: flags, then the environment (MOE_NAME: capitals, _ for -, without a leading moe-;
MOE_DATA splits at ':'), then --config, then defaults.
Flags of Megatron and DeepSpeed that say what is done anyway are taken, and one line lists them
(docs/coming_from.md).
DeepSpeed's keys in --config: train_batch_size, train_micro_batch_size_per_gpu,
gradient_accumulation_steps, gradient_clipping, steps_per_print, seed, optimizer (Adam, AdamW),
scheduler (WarmupLR, WarmupDecayLR, WarmupCosineLR; "warmup_type": "linear"), bf16, fp16 with its
loss scaling. "auto" leaves a value to flags and defaults, and what is off (ZeRO at stage 0, a
section with "enabled": false) says nothing. One message names all keys that are refused.

Learning rate of step s, from 1, with W = lr-warmup-steps and D = lr-decay-steps
  s <= W   lr s / W
  else     min-lr + (lr - min-lr) (1 + cos(pi (s - 1 - W) / (D - W))) / 2, as Megatron's and
           PyTorch's, which count from 0: the last step still learns; from D + 1 on, min-lr

Progress and results
  tok/s    tokens of a step / time of its slowest rank
  a2a      dispatch + combine: time in exchanges, mean over ranks
  ar       gradient all-reduce, which overlaps backward
  drop     slots over capacity / slots; a slot is one (token, choice)
  maxvio   MaxVio, (largest expert load - mean load) / mean load, of the worst layer
  dead     experts without a token in the step, over all layers
  aux      balance loss with its coefficient, summed over layers
  gnorm    2-norm of the gradient before clipping
  bits per byte (with --tokens, per token) = loss in nats / ln 2
  exchange, at the end: what dispatch + combine went into, mean over ranks
    copy     rows move, and all ranks of the expert-parallel group are there
    gather   the rest: rows are put into the order of sending and of the experts, scaled, and summed
             at home
    wait     of every all-to-all (direct: every fence), what a rank was in it beyond the shortest
             time after which one of its group, the last to come, had its rows; by its own clock
  communication, at the end: bytes that left a rank / seconds of dispatch + combine, and of the
           gradient all-reduce; bench peak: the same bytes / (calls x the shortest time of a call of
           the mean size, alone, right after training: moe bench alltoallv and allreduce)
  GB = 1e9 bytes, MiB = 2^20 bytes

-o json: the object of the last line of metrics.jsonl with communication, files and command.

Files: DIR/metrics.jsonl has one object per step, written as it ends. The first line is the start:
the build (version, commit), the machine and all settings, which --config takes; the last line holds
weights_xxh3.
A resumed run goes on in the metrics.jsonl of --out, behind the step it resumes after, and in the
curves of --tensorboard-dir.
loss_hex is the loss in C's hexadecimal notation (%a): equal text means equal bits.
--trace and --record-routing: docs/trace.md.

Exit codes: 0 ok, 2 usage or settings, 3 malformed input, 4 a write failed, 5 out of memory,
6 loss or gradients not finite, or copies of a weight that differ, 7 a rank failed, 8 timeout,
9 rendezvous, 10 no such backend, 11 stopped on request (its checkpoint goes on).
)";

}  // namespace

void AddLayoutSettings(lm::TrainConfig& train, Table& table) {
  const SettingRows rows = lm::RowsOf(train);
  AddRankSettings(table);
  AddShareDeviceSetting(table);
  table
      .Add("--expert-model-parallel-size, --ep N", rows,
           "EP: ranks that share one set of experts; divides R / PP; data-parallel size = R / "
           "PP / TP; auto: the most that fit, at most the number of experts")
      .Roles(kOfLayer)
      .words = {"auto"};
  table.Add("--pipeline-model-parallel-size, --pp N", rows,
            "PP: stages, groups of ranks with a part of the layers each; divides R");
  table.Add("--num-virtual-stages-per-pipeline-rank, --vp N", rows,
            "chunks of layers of each stage: less idle time, more rows between stages");
  table.Add("--pipeline-schedule NAME", rows,
            "order of a stage's passes: gpipe, 1f1b, zb-h1 (weight gradients fill its waits), "
            "interleaved with --vp 2 or more, or with any --pp and --vp 1f1b-overlap (a forward "
            "and a backward in turns, which hides their exchanges); the same bits");
  AddThreadsSetting(table);
  table
      .Add("--dispatch NAME", rows,
           "how tokens travel; direct reads peers' memory; hierarchical goes through one rank per "
           "node")
      .Roles(kOfLayer);
  table
      .Add("--node-size N", rows,
           "consecutive ranks of an EP group that stand for one host; divides EP with --dispatch "
           "hierarchical; 0 = hosts are the real ones")
      .Least(0)
      .Roles(kOfLayer);
}

Table TrainSettings(TrainOptions& options) {
  const SettingRows rows = lm::RowsOf(options.train);
  Table table;
  AddData(options, rows, table);
  AddModel(options.train.model, rows, table);
  AddParallel(options, rows, table);
  AddOptimizer(rows, table);
  AddCheckpoints(options.train.checkpoints, rows, table);
  AddRecords(options, table);
  AddFailures(options, table);
  AddOutput(options, table);
  return table;
}

CommandHelp TrainHelp() {
  TrainOptions defaults;
  return {.head = kHead, .settings = TrainSettings(defaults).rows(), .tail = kTail};
}

}  // namespace moe::cli
