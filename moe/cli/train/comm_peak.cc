#include "moe/cli/train/comm_peak.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/bench/collectives.h"

namespace moe::cli {
namespace {

double Rate(int64_t bytes, double seconds) {
  return seconds > 0 ? static_cast<double>(bytes) / seconds * 1e-9 : 0;
}

// Seconds of one call of `spec` on `comm`: the median.
absl::StatusOr<double> SecondsOf(const bench::CaseSpec& spec, Communicator& comm, Stream& stream) {
  constexpr int64_t kMostBytes = int64_t{16} << 20;  // of all calls, but for the first three
  const auto calls = static_cast<int>(std::clamp<int64_t>(kMostBytes / spec.size_bytes, 3, 10));
  const bench::MeasureOptions options = {.iterations = calls,
                                         .warmup = 1,
                                         .check = bench::Check::kNo,
                                         .max_noise_pct = 100,
                                         .budget = absl::ZeroDuration()};
  MOE_ASSIGN_OR_RETURN(const bench::BenchRow row,
                       bench::MeasureCollective(spec, options, {}, comm, stream));
  return row.samples_us.p50 * 1e-6;
}

// Calls of the exchange on one rank: four movements of every chunk, MoE layer and micro-batch.
int64_t Exchanges(const lm::TrainConfig& config, int64_t steps, int ranks) {
  const lm::TransformerConfig& model = config.model;
  const int ep = config.expert_parallel_size;
  const int64_t most_experts = (model.moe.router.num_experts + ep - 1) / ep;
  const int64_t chunks = std::min<int64_t>(model.moe.overlap_degree, most_experts);
  const int64_t rounds = (config.micro_batches + ranks - 1) / ranks;
  return 4 * steps * rounds * (model.num_layers / model.moe_layer_freq) * chunks;
}

absl::StatusOr<CommRate> MeasureExchange(const lm::TrainConfig& config,
                                         const lm::TrainReport& report, Communicator& world,
                                         Communicator& group, Stream& stream) {
  const ExchangeBytes& bytes = report.exchange_bytes;
  const int64_t left = bytes.same_node + bytes.cross_node;
  const DispatcherOptions& dispatcher = config.model.moe.dispatcher;
  // Hierarchical counts both of its hops.
  // On a GPU it ran staged (Dispatcher::Create): two hops move memory of the host alone.
  const bool hierarchical = dispatcher.algorithm == DispatchAlgorithm::kHierarchical;
  const bool staged = hierarchical && config.device == DeviceKind::kCuda;
  const int hops = hierarchical && !staged ? 2 : 1;
  CommRate rate = {.name = "dispatch + combine",
                   .calls = Exchanges(config, report.steps, world.size()),
                   .moved_bytes = left / world.size(),
                   .seconds = report.phase_seconds[static_cast<int>(Phase::kDispatch)] +
                              report.phase_seconds[static_cast<int>(Phase::kCombine)]};
  const int64_t all = (bytes.self + left) / hops;
  rate.size_bytes = all / world.size() / std::max<int64_t>(1, rate.calls);
  MOE_ASSIGN_OR_RETURN(
      const double call,
      SecondsOf({.op = bench::Op::kAllToAllV,
                 .dtype = config.dtype,
                 .size_bytes = std::max<int64_t>(rate.size_bytes, SizeOf(config.dtype)),
                 .dispatch = staged ? DispatchAlgorithm::kStaged : dispatcher.algorithm,
                 .node_size = dispatcher.node_size},
                group, stream));
  rate.bench_seconds = call * static_cast<double>(rate.calls);
  return rate;
}

// Adds the buckets of one group of parameters to `rate`.
absl::Status MeasureReduction(const lm::TrainConfig& config,
                              const GradientReducer::Traffic& traffic, Communicator& group,
                              Stream& stream, CommRate& rate) {
  if (traffic.buckets == 0) return absl::OkStatus();
  const int64_t ranks = group.size();
  const int64_t size = traffic.bytes_sent * ranks / (2 * (ranks - 1)) / traffic.buckets;
  MOE_ASSIGN_OR_RETURN(
      const double call,
      SecondsOf({.op = bench::Op::kAllReduce,
                 .dtype = config.numerics == Numerics::kFast ? DType::kFloat32 : DType::kInt64,
                 .size_bytes = std::max<int64_t>(size, 8),
                 .all_reduce = config.all_reduce},
                group, stream));
  rate.size_bytes =
      (rate.size_bytes * rate.calls + size * traffic.buckets) / (rate.calls + traffic.buckets);
  rate.calls += traffic.buckets;
  rate.moved_bytes += traffic.bytes_sent;
  rate.bench_seconds += call * static_cast<double>(traffic.buckets);
  return absl::OkStatus();
}

}  // namespace

double CommRate::gbytes_per_s() const {
  return Rate(moved_bytes, seconds);
}

double CommRate::bench_gbytes_per_s() const {
  return Rate(moved_bytes, bench_seconds);
}

absl::StatusOr<std::vector<CommRate>> MeasurePeak(const lm::TrainConfig& config,
                                                  const lm::TrainReport& report,
                                                  std::unique_ptr<Communicator> world) {
  const int ep = config.expert_parallel_size;
  const int rank = world->rank();
  MOE_ASSIGN_OR_RETURN(const auto expert_parallel, world->Split(rank / ep, rank));
  MOE_ASSIGN_OR_RETURN(const auto expert_data_parallel, world->Split(rank % ep, rank));
  // Where training moved it: on the GPU over NCCL, else on the host.
  MOE_ASSIGN_OR_RETURN(const auto stream, bench::StreamOfCalls(world->device().value_or(Device())));
  std::vector<CommRate> rates;
  if (ep > 1) {
    MOE_ASSIGN_OR_RETURN(CommRate rate,
                         MeasureExchange(config, report, *world, *expert_parallel, *stream));
    rates.push_back(std::move(rate));
  }
  if (config.zero != ZeroStage::kNone) return rates;  // gradients are not all-reduced
  MOE_RETURN_IF_ERROR(world->Barrier());
  CommRate gradients = {.name = "gradient all-reduce",
                        .seconds = report.phase_seconds[static_cast<int>(Phase::kAllReduce)]};
  MOE_RETURN_IF_ERROR(
      MeasureReduction(config, report.reduced[static_cast<int>(ParameterGroup::kReplicated)],
                       *world, *stream, gradients));
  MOE_RETURN_IF_ERROR(MeasureReduction(config,
                                       report.reduced[static_cast<int>(ParameterGroup::kExpert)],
                                       *expert_data_parallel, *stream, gradients));
  if (gradients.calls > 0) rates.push_back(std::move(gradients));
  return rates;
}

std::string PeakText(const std::vector<CommRate>& rates) {
  if (rates.empty()) return {};
  std::string text = fmt::format("\n{:<22}{:>9}{:>10}{:>9}{:>14}{:>14}{:>11}\n", "communication",
                                 "calls", "size", "seconds", "reached", "bench peak", "of peak");
  for (const CommRate& rate : rates) {
    const double share = rate.seconds > 0 ? 100 * rate.bench_seconds / rate.seconds : 0;
    text +=
        fmt::format("{:<22}{:>9}{:>10}{:>9.3f}{:>9.3f} GB/s{:>9.3f} GB/s{:>9.1f} %\n", rate.name,
                    WithCommas(rate.calls), BytesText(static_cast<double>(rate.size_bytes)),
                    rate.seconds, rate.gbytes_per_s(), rate.bench_gbytes_per_s(), share);
  }
  return text +
         "bytes that leave a rank / time, per rank; bench peak: the same calls alone, all ranks "
         "ready\n(moe bench). The rest: gather and wait of the exchange; in an all-reduce, waiting "
         "for\nslower ranks.\n";
}

}  // namespace moe::cli
