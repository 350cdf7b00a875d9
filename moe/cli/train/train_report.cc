#include "moe/cli/train/train_report.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <numbers>
#include <numeric>
#include <utility>

#include <absl/strings/str_join.h>
#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/measure/collectives.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/plan/model_cost.h"

namespace moe::cli {
namespace {

using Text = fmt::memory_buffer;

template <typename... Args>
void Add(Text& text, fmt::format_string<Args...> format, Args&&... args) {
  fmt::format_to(std::back_inserter(text), format, std::forward<Args>(args)...);
}

// Steps that this run took, at least one.
int64_t StepsOf(const lm::TrainReport& report) {
  return std::max<int64_t>(1, report.steps - report.first_step);
}

double Bits(float nats) {
  return nats / std::numbers::ln2;
}

// "999,999", "1.23 M", "1.23 G": with a unit from a million on.
std::string CountText(int64_t count) {
  const auto value = static_cast<double>(count);
  if (value < 1e6) return WithCommas(count);
  return value < 1e9 ? fmt::format("{:.2f} M", value / 1e6) : fmt::format("{:.2f} G", value / 1e9);
}

std::string RanksAre(const std::string& backend, int ranks) {
  if (backend == "nccl") return ranks == 1 ? "a GPU over NCCL" : "GPUs over NCCL";
  if (backend == "local") return ranks == 1 ? "this process" : "threads of this process";
  return ranks == 1 ? "an MPI process" : "MPI processes";
}

// If the ranks do not divide M, some ranks wait for others in every step.
void AddUnevenWork(Text& text, int64_t micro_batches, int64_t ranks) {
  const int64_t busy = micro_batches % ranks, least = micro_batches / ranks;
  if (busy == 0) return;
  Add(text, "uneven {} of {} ranks: {} a step, the others {}; --micro-batches {} takes no longer\n",
      busy, ranks, Counted(least + 1, "micro-batch"), least, (least + 1) * ranks);
}

// How experts divide the ranks of a stage, before that how layers without experts do, if they do
// otherwise, and the stages: "TP 2 x DP 4, experts EP 2 x ETP 2 x DP 2; PP 2, 1f1b".
std::string DegreesText(const TrainerOptions& trainer, int ranks) {
  const MeshShape& mesh = trainer.session.mesh;
  const int of_stage = ranks / mesh.pipeline;
  const std::string shared =
      mesh.expert_tensor > 1 ? fmt::format(" x ETP {}", mesh.expert_tensor) : "";
  std::string text = fmt::format("EP {}{} x DP {}", mesh.expert, shared,
                                 of_stage / mesh.expert / mesh.expert_tensor);
  if (mesh.tensor > 1) {
    text = fmt::format("TP {} x DP {}, experts {}", mesh.tensor, of_stage / mesh.tensor, text);
  }
  if (mesh.pipeline == 1) return text;
  const PipelineShape shape = PipelineOf(trainer);
  text += fmt::format("{} PP {}, {}", mesh.tensor > 1 ? ";" : " x", shape.stages,
                      NameOf(shape.schedule, kScheduleWords));
  if (shape.chunks > 1) text += fmt::format(" of {} chunks", shape.chunks);
  return text;
}

void AddLoss(Text& text, const lm::TrainReport& report, const char* unit) {
  Add(text, "held-out bits per {:<7}{:.4f} -> {:.4f}   ({:.4f} -> {:.4f} nats)\n", unit,
      Bits(report.validation_loss_before), Bits(report.validation_loss_after),
      report.validation_loss_before, report.validation_loss_after);
  const double tokens = static_cast<double>(report.tokens);
  Add(text, "throughput               {} tok/s   ({} tokens in {:.1f} s, {:.1f} ms a step)\n",
      WithCommas(report.seconds > 0 ? std::llround(tokens / report.seconds) : 0),
      WithCommas(report.tokens), report.seconds,
      1e3 * report.seconds / static_cast<double>(StepsOf(report)));
}

void AddPhases(Text& text, const lm::TrainReport& report) {
  Add(text, "\n{:<14}{:>10}  {:>9}\n", "phase", "seconds", "of steps");
  double sum = 0;
  const auto row = [&](const char* name, double seconds) {
    Add(text, "{:<14}{:>10.3f}  {:>7.1f} %\n", name, seconds,
        report.seconds > 0 ? 100 * seconds / report.seconds : 0);
    sum += seconds;
  };
  for (int p = 0; p < static_cast<int>(Phase::kCount); ++p) {
    // Without a pipeline nobody waits for one.
    if (static_cast<Phase>(p) == Phase::kPipeline && report.phase_seconds[p] == 0) continue;
    row(NameOf(static_cast<Phase>(p)), report.phase_seconds[p]);
  }
  if (sum < report.seconds) row("other, waiting", report.seconds - sum);
  Add(text,
      "mean over ranks; the all-reduce overlaps backward, so shares may add up to over 100 %\n");
}

// Adds the parts of the phases dispatch and combine.
void AddExchange(Text& text, const lm::TrainReport& report) {
  const ExchangeSeconds& parts = report.exchange_seconds;
  const double all = parts.copy + parts.gather + parts.wait;
  Add(text, "\n{:<14}{:>10}  {:>9}\n", "exchange", "seconds", "share");
  const auto row = [&](const char* name, double seconds, const char* what) {
    Add(text, "{:<14}{:>10.3f}  {:>7.1f} %  {}\n", name, seconds, all > 0 ? 100 * seconds / all : 0,
        what);
  };
  row("copy", parts.copy, "rows move, all ranks are there");
  row("gather", parts.gather, "rows are put in order, and summed at home");
  row("wait", parts.wait, "for ranks that come later, have more to move or lack a core");
  Add(text, "together the phases dispatch and combine; ranks late to a layer show in plan\n");
}

void AddExpertLoad(Text& text, const TrainOptions& options, const lm::TrainReport& report) {
  constexpr size_t kMostListed = 16;
  const lm::TransformerConfig& model = options.train.model;
  const double even = 100.0 / model.moe.router.num_experts;
  Add(text, "\nexpert load: share of a layer's slots in percent, even would be {:.2f}\n", even);
  Add(text, "{:<8}{:>7}{:>7}{:>8}{:>6}", "layer", "min", "max", "maxvio", "dead");
  const bool listed = model.moe.router.num_experts <= static_cast<int>(kMostListed);
  Add(text, "{}\n", listed ? "   each expert" : "");
  for (size_t i = 0; i < report.expert_load.size(); ++i) {
    const auto& all = report.expert_load[i];
    const std::vector<int64_t> load(all.begin(), all.begin() + model.moe.router.num_experts);
    const auto total = static_cast<double>(
        std::max<int64_t>(1, std::accumulate(load.begin(), load.end(), int64_t{0})));
    const auto [least, most] = std::minmax_element(load.begin(), load.end());
    const auto share = [&](int64_t count) {
      return 100 * static_cast<double>(count) / total;
    };
    Add(text, "{:<8}{:>7.2f}{:>7.2f}{:>8.2f}{:>6}", (i + 1) * model.moe_layer_freq - 1,
        share(*least), share(*most), share(*most) / even - 1,
        std::count(load.begin(), load.end(), 0));
    if (listed) Add(text, "  ");
    for (size_t e = 0; listed && e < load.size(); ++e) Add(text, " {:>5.1f}", share(load[e]));
    Add(text, "\n");
    if (all.size() == load.size()) continue;
    const auto identity =
        static_cast<double>(std::accumulate(all.begin() + load.size(), all.end(), int64_t{0}));
    Add(text, "{:<8}and {:.2f} % of all slots to experts that return the token\n", "",
        100 * identity / std::max(1.0, total + identity));
  }
  const double dropped = report.total_slots > 0 ? static_cast<double>(report.dropped_slots) /
                                                      static_cast<double>(report.total_slots)
                                                : 0;
  Add(text, "dropped {} of {}, {:.2f} %{}\n", WithCommas(report.dropped_slots),
      Counted(report.total_slots, "slot"), 100 * dropped,
      model.moe.router.capacity_factor.has_value() ? "" : " (no capacity limit)");
  if (report.skipped_steps > 0) {
    Add(text, "skipped {} of {}, whose gradients {}\n", WithCommas(report.skipped_steps),
        Counted(report.steps, "step"),
        options.train.trainer.dtype == DType::kFloat16 ? "overflowed float16"
                                                       : "lay off the exact grid");
  }
}

// Reports the grid's loss if it is above kNamedGridLoss, and its unit if it is not the default.
void AddGrid(Text& text, const lm::TrainReport& report) {
  if (report.grid_loss > kNamedGridLoss) {
    Add(text, "the exact grid took up to {:.1e} of {} in step {}, relative to its norm\n",
        report.grid_loss, report.grid_loss_tensor, report.grid_loss_step);
  }
  if (report.grid_unit_log2.value_or(ExactGrid().unit_log2) != ExactGrid().unit_log2) {
    Add(text, "the exact grid's unit is 2^{}\n", *report.grid_unit_log2);
  }
}

void AddTraffic(Text& text, const lm::TrainReport& report, ZeroStage zero) {
  const auto steps = static_cast<double>(StepsOf(report));
  const auto row = [&](const char* what, int64_t bytes) {
    const auto all = static_cast<double>(bytes);
    Add(text, "{:<32}{:>10}{:>12}\n", what, BytesText(all), BytesText(all / steps));
  };
  Add(text, "\n{:<32}{:>10}{:>12}\n", "moved, sum over ranks", "in all", "per step");
  row("experts: on the same rank", report.exchange_bytes.self);
  row("experts: to a rank of the node", report.exchange_bytes.same_node);
  row("experts: to another node", report.exchange_bytes.cross_node);
  row(zero == ZeroStage::kNone ? "gradients: all-reduce" : "gradients: scatter, weights: gather",
      report.all_reduce_bytes);
  if (report.pipeline_bytes > 0) row("rows: between stages", report.pipeline_bytes);
  if (report.tensor_bytes > 0) row("sums, rows: of tensor ranks", report.tensor_bytes);
  Add(text, "state of a rank {}, by the formula {} (--zero {})\n",
      BytesText(static_cast<double>(report.state_bytes)),
      BytesText(static_cast<double>(report.state_bytes_formula)), static_cast<int>(zero));
}

// 1e9 bytes per second; 0 in no time.
double Rate(int64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds * 1e-9 : 0;
}

// Seconds of one call of `spec` on `comm`: the shortest call, which other work on the cores
// lengthens least.
absl::StatusOr<double> SecondsOf(const measure::CaseSpec& spec, Communicator& comm,
                                 Stream& stream) {
  // Bytes of all timed calls together; but at least three calls are timed.
  constexpr int64_t kMostBytes = int64_t{16} << 20;
  const auto calls = static_cast<int>(std::clamp<int64_t>(kMostBytes / spec.size_bytes, 3, 10));
  const measure::MeasureOptions options = {.iterations = calls,
                                           .warmup = 1,
                                           .check = measure::Check::kNo,
                                           .max_noise_pct = 100,
                                           .budget = absl::ZeroDuration()};
  MOE_ASSIGN_OR_RETURN(const measure::BenchRow row,
                       measure::MeasureCollective(spec, options, {}, comm, stream));
  return row.samples_us.min * 1e-6;
}

// Calls of the exchange on one of `ranks` that have micro-batches of their own, or parts of them:
// four movements of every chunk, MoE layer and micro-batch.
int64_t Exchanges(const lm::TrainConfig& config, int64_t steps, int ranks) {
  const lm::TransformerConfig& model = config.model;
  const int ep = config.trainer.session.mesh.expert, stages = config.trainer.session.mesh.pipeline;
  const int64_t most_experts = (model.moe.router.num_experts + ep - 1) / ep;
  const int64_t chunks = std::min<int64_t>(model.moe.overlap_degree, most_experts);
  const int64_t rounds = RoundsOf(ranks / stages, config.trainer.micro_batches);
  return 4 * steps * rounds * (model.num_layers / model.moe_layer_freq) / stages * chunks;
}

absl::StatusOr<CommRate> MeasureExchange(const lm::TrainConfig& config,
                                         const lm::TrainReport& report, Communicator& world,
                                         Communicator& group, Stream& stream) {
  const ExchangeBytes& bytes = report.exchange_bytes;
  const int64_t left = bytes.same_node + bytes.cross_node;
  const DispatcherOptions& dispatcher = config.model.moe.dispatcher;
  // Hierarchical dispatch merges rows and counts both of its hops: one exchange of as many bytes.
  const bool hierarchical = dispatcher.algorithm == DispatchAlgorithm::kHierarchical;
  CommRate rate = {
      .name = "dispatch + combine",
      .calls = Exchanges(config, report.steps, world.size() / config.trainer.session.mesh.tensor),
      .moved_bytes = left / world.size(),
      .seconds = report.phase_seconds[static_cast<int>(Phase::kDispatch)] +
                 report.phase_seconds[static_cast<int>(Phase::kCombine)]};
  const int64_t all = bytes.self + left;
  rate.size_bytes = all / world.size() / std::max<int64_t>(1, rate.calls);
  MOE_ASSIGN_OR_RETURN(
      const double call,
      SecondsOf({.op = measure::Op::kAllToAllV,
                 .dtype = config.trainer.dtype,
                 .size_bytes = std::max<int64_t>(rate.size_bytes, SizeOf(config.trainer.dtype)),
                 .dispatch = hierarchical ? DispatchAlgorithm::kStaged : dispatcher.algorithm,
                 .node_size = dispatcher.node_size},
                group, stream));
  rate.bench_seconds = call * static_cast<double>(rate.calls);
  return rate;
}

// Adds the buckets of one group of parameters to `rate`.
absl::Status MeasureReduction(const TrainerOptions& trainer,
                              const GradientReducer::Traffic& traffic, Communicator& group,
                              Stream& stream, CommRate& rate) {
  if (traffic.buckets == 0) return absl::OkStatus();
  const int64_t ranks = group.size();
  const int64_t size = traffic.bytes_sent * ranks / (2 * (ranks - 1)) / traffic.buckets;
  MOE_ASSIGN_OR_RETURN(
      const double call,
      SecondsOf(
          {.op = measure::Op::kAllReduce,
           .dtype = trainer.session.numerics == Numerics::kFast ? DType::kFloat32 : DType::kInt64,
           .size_bytes = std::max<int64_t>(size, 8),
           .all_reduce = trainer.all_reduce},
          group, stream));
  rate.size_bytes =
      (rate.size_bytes * rate.calls + size * traffic.buckets) / (rate.calls + traffic.buckets);
  rate.calls += traffic.buckets;
  rate.moved_bytes += traffic.bytes_sent;
  rate.bench_seconds += call * static_cast<double>(traffic.buckets);
  return absl::OkStatus();
}

}  // namespace

std::string StartText(const TrainOptions& options, const lm::Corpus& corpus,
                      const std::string& backend) {
  const lm::TrainConfig& train = options.train;
  const SessionOptions& session = train.trainer.session;
  const MoeLayerConfig& moe = train.model.moe;
  const plan::ModelSize size = plan::SizeOf(train.model);
  Text text;
  Add(text, "text   {}, {}: {} to train on, {} held out; {}\n",
      Counted(static_cast<int64_t>(corpus.files.size()), "file"),
      Counted(corpus.train.size() + corpus.held_out.size(), corpus.unit),
      WithCommas(corpus.train.size()), WithCommas(corpus.held_out.size()), TextOf(corpus.skipped));
  Add(text, "model  {} parameters, {} used per token; {}, H {}, {} of F {}, top-{} {}\n",
      CountText(size.total), CountText(size.active), Counted(train.model.num_layers, "layer"),
      train.model.hidden_size, Counted(moe.router.num_experts, "expert"), moe.ffn_hidden_size,
      moe.router.top_k, moe.router.gate);
  Add(text, "mesh   {} ({}) = {}; threads per rank {}; {}, {}\n", Counted(options.ranks, "rank"),
      RanksAre(backend, options.ranks), DegreesText(train.trainer, options.ranks), session.threads,
      NameOf(train.trainer.dtype),
      session.numerics == Numerics::kFast ? "fast numerics" : "layout-invariant numerics");
  Add(text, "step   {} x {} x {} = {}\n", Counted(train.trainer.micro_batches, "micro-batch"),
      Counted(train.micro_batch_size, "sequence"), Counted(train.sequence_length, corpus.unit),
      Counted(train.trainer.micro_batches * train.micro_batch_size * train.sequence_length,
              "token"));
  AddUnevenWork(text, train.trainer.micro_batches,
                options.ranks / session.mesh.pipeline / session.mesh.tensor);
  return fmt::to_string(text);
}

std::string MemoryText(const plan::MemoryEstimate& estimate, int local_ranks) {
  const auto mib = [](double bytes) {
    return fmt::format("{:.1f} MiB", bytes / 0x1p20);
  };
  std::string text = fmt::format(
      "memory  {} a rank: {} of parameters, gradients and optimiser, {} of activations\n",
      mib(estimate.used_bytes()), mib(estimate.state_bytes()), mib(estimate.activation_bytes));
  const int64_t available = measure::AvailableMemoryBytes();
  absl::StrAppend(&text, "here    ", Counted(local_ranks, "rank"), ": ",
                  mib(estimate.used_bytes() * local_ranks), ", with room to grow ",
                  mib(estimate.total_bytes() * local_ranks), ", of ",
                  available > 0 ? mib(static_cast<double>(available)) : "an unknown number of MiB",
                  " that are available\n");
  return text;
}

std::string MemoryJson(const plan::MemoryEstimate& estimate, int local_ranks) {
  auto object = nlohmann::ordered_json::object();
  object["rank_bytes"] = std::llround(estimate.used_bytes());
  object["state_bytes"] = std::llround(estimate.state_bytes());
  object["activation_bytes"] = std::llround(estimate.activation_bytes);
  object["workspace_bytes"] = std::llround(estimate.workspace_bytes);
  object["local_ranks"] = local_ranks;
  object["available_bytes"] = nullptr;
  if (const int64_t available = measure::AvailableMemoryBytes(); available > 0) {
    object["available_bytes"] = available;
  }
  return object.dump() + "\n";
}

std::string ReportJson(const lm::TrainReport& report, const RunFacts& facts,
                       const std::vector<CommRate>& rates) {
  using Json = nlohmann::ordered_json;
  Json object = Json::parse(FinalLine(report));
  Json& communication = object["communication"] = Json::array();
  for (const CommRate& rate : rates) {
    Json each = Json::object();  // converting a null breaks it if memory runs out
    each["name"] = rate.name;
    each["calls"] = rate.calls;
    each["size_bytes"] = rate.size_bytes;
    each["moved_bytes"] = rate.moved_bytes;
    each["seconds"] = rate.seconds;
    each["bench_seconds"] = rate.bench_seconds;
    communication.push_back(std::move(each));
  }
  object["files"] = facts.files;
  object["command"] = facts.command;
  return object.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string ReportText(const TrainOptions& options, const lm::TrainReport& report,
                       const RunFacts& facts) {
  const TrainerOptions& trainer = options.train.trainer;
  const int ep = trainer.session.mesh.expert;
  Text text;
  std::string what = Counted(report.steps - report.first_step, "step");
  if (report.first_step > 0) what += fmt::format(" after step {}", report.first_step);
  if (report.stopped) what += ", stopped on request,";
  Add(text, "trained {} in {} on {} ({}) = {}\n\n", what, ClockText(report.seconds),
      Counted(options.ranks, "rank"), RanksAre(facts.backend, options.ranks),
      DegreesText(trainer, options.ranks));
  AddLoss(text, report, options.data.unit());
  AddPhases(text, report);
  if (ep > 1) AddExchange(text, report);
  AddExpertLoad(text, options, report);
  AddGrid(text, report);
  AddTraffic(text, report, trainer.zero);
  Add(text, "\nparameters    {} in all, {} used per token\n", WithCommas(report.parameters_total),
      WithCommas(report.parameters_active));
  if (report.bfloat16_order.has_value()) {
    Add(text, "bf16 order    {}\n", NameOf(*report.bfloat16_order, kBFloat16OrderWords));
  }
  Add(text, "files         {}\n",
      facts.files.empty() ? "none (--out DIR writes metrics.jsonl)"
                          : Printable(absl::StrJoin(facts.files, ", ")));
  Add(text, "weights_xxh3  {}\n", HashText(report.weights_xxh3));
  Add(text, "reproduce     {}\n", facts.command);
  return fmt::to_string(text);
}

absl::StatusOr<std::vector<CommRate>> MeasurePeak(const lm::TrainConfig& config,
                                                  const lm::TrainReport& report,
                                                  std::unique_ptr<Communicator> world) {
  const MeshShape& mesh = config.trainer.session.mesh;
  MOE_ASSIGN_OR_RETURN(const auto expert_parallel, SplitGroup(*world, mesh, MeshGroup::kExpert));
  MOE_ASSIGN_OR_RETURN(const auto expert_data_parallel,
                       SplitGroup(*world, mesh, MeshGroup::kExpertData));
  MOE_ASSIGN_OR_RETURN(const auto stage, SplitGroup(*world, mesh, MeshGroup::kStage));
  // The device that training moved data on: the GPU over NCCL, else the host.
  MOE_ASSIGN_OR_RETURN(const auto stream,
                       measure::StreamOfCalls(world->device().value_or(Device())));
  std::vector<CommRate> rates;
  if (mesh.expert > 1) {
    MOE_ASSIGN_OR_RETURN(CommRate rate,
                         MeasureExchange(config, report, *world, *expert_parallel, *stream));
    rates.push_back(std::move(rate));
  }
  // Otherwise gradients are not all-reduced, or over several groups.
  const bool of_ends = config.model.tied_embeddings && mesh.pipeline > 1;
  const bool of_biases = config.model.moe.projection_biases && mesh.expert_tensor > 1;
  if (config.trainer.zero != ZeroStage::kNone || mesh.tensor > 1 || of_ends || of_biases) {
    return rates;
  }
  MOE_RETURN_IF_ERROR(world->Barrier());
  CommRate gradients = {.name = "gradient all-reduce",
                        .seconds = report.phase_seconds[static_cast<int>(Phase::kAllReduce)]};
  MOE_RETURN_IF_ERROR(
      MeasureReduction(config.trainer, report.reduced_replicated, *stage, *stream, gradients));
  MOE_RETURN_IF_ERROR(MeasureReduction(config.trainer, report.reduced_experts,
                                       *expert_data_parallel, *stream, gradients));
  if (gradients.calls > 0) rates.push_back(std::move(gradients));
  return rates;
}

std::string PeakText(const std::vector<CommRate>& rates) {
  if (rates.empty()) return {};
  std::string text = fmt::format("\n{:<22}{:>9}{:>10}{:>9}{:>14}{:>14}{:>11}\n", "communication",
                                 "calls", "size", "seconds", "reached", "bench peak", "of peak");
  bool above = false;
  for (const CommRate& rate : rates) {
    const double share = rate.seconds > 0 ? 100 * rate.bench_seconds / rate.seconds : 0;
    above = above || share > 100;
    text += fmt::format(
        "{:<22}{:>9}{:>10}{:>9.3f}{:>9.3f} GB/s{:>9.3f} GB/s{:>9.1f} %\n", rate.name,
        WithCommas(rate.calls), BytesText(static_cast<double>(rate.size_bytes)), rate.seconds,
        Rate(rate.moved_bytes, rate.seconds), Rate(rate.moved_bytes, rate.bench_seconds), share);
  }
  return text +
         "bytes that leave a rank / time, per rank; bench peak: the same calls alone, all ranks "
         "ready\n(moe bench), at their fastest. The rest: gather and wait of the exchange; in an "
         "all-reduce,\nwaiting for slower ranks.\n" +
         (above ? "Above 100 %: the calls alone, after training, were slower, as where other work "
                  "has the cores.\n"
                : "");
}

}  // namespace moe::cli
