#include "moe/bench/layer_bench.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/swiglu/swiglu.h"
#include "moe/bench/assigned_gate.h"
#include "moe/bench/slots.h"
#include "moe/bench/timing.h"
#include "moe/gradient_reducer.h"
#include "moe/lm/step_totals.h"
#include "moe/parameter.h"
#include "moe/session.h"

namespace moe::bench {
namespace {

constexpr Phase kPhases[] = {Phase::kGate, Phase::kPlan, Phase::kDispatch, Phase::kExpert,
                             Phase::kCombine};
constexpr int kParts = static_cast<int>(std::size(kPhases)) + 1;  // and all of them
constexpr const char* kPasses[] = {"forward", "backward"};
// Results that calls are compared with, of one rank; those of a trace's later records are not kept.
constexpr int64_t kMostKeptBytes = int64_t{256} << 20;

// Microseconds of one call on one rank: [pass][part].
using CallTimes = std::array<double, 2 * kParts>;

// What ranks have at the same time, summed over them.
struct Load {
  std::vector<int64_t> expert_count;  // [E]
  int64_t dropped = 0;
  int64_t calls = 0;
};

// The slots of this rank in a call.
TokenSlots SlotsOf(const LayerSpec& spec, const Communicator& world, int64_t call) {
  if (spec.routing->kind == RoutingSpec::kTrace) {
    const Replay& replay = *spec.routing->replay;
    return DealSlots(replay.slots_of(call, world.rank()), replay.record(call).tokens[world.rank()]);
  }
  return DrawSlots(*spec.routing, {.rank = world.rank(),
                                   .ranks = world.size(),
                                   .expert_parallel_size = spec.expert_parallel_size,
                                   .tokens = spec.tokens,
                                   .top_k = spec.layer.router.top_k,
                                   .num_experts = spec.layer.router.num_experts,
                                   .seed = spec.seed});
}

// The layer of one rank with its tokens.
template <typename T>
class LayerOnRank {
 public:
  LayerOnRank(const LayerSpec& spec, const Context& context)
      : spec_(spec), context_(context), store_(DTypeOf<T>::value, spec.seed) {}

  absl::Status Setup(Stream& gradients) {
    MoeLayerConfig config = spec_.layer;
    config.router.seed = spec_.seed;
    config.router.micro_batch_tokens = spec_.tokens;
    int64_t most = spec_.tokens;
    if (spec_.routing.has_value()) {
      const bool trace = spec_.routing->kind == RoutingSpec::kTrace;
      if (trace) most = spec_.routing->replay->most_tokens();
      const int64_t most_slots =
          trace ? spec_.routing->replay->most_slots_of_a_token() : spec_.layer.router.top_k;
      gate_ = std::make_unique<AssignedGate>(SlotsOf(spec_, context_.mesh->world(), 0),
                                             static_cast<int32_t>(most_slots));
      gate_->Choose(config.router);
      // Ranks and calls may differ.
      config.router.micro_batch_tokens = 0;
    }
    MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, "layer.", store_, context_));
    MOE_ASSIGN_OR_RETURN(reducer_, GradientReducer::Create({}, store_, context_, gradients));
    const auto fill = [&](std::vector<T>& values, uint32_t which) {
      values.resize(most * hidden());
      for (size_t i = 0; i < values.size(); ++i) {
        values[i] = T(
            static_cast<float>(Normal({.seed = spec_.seed,
                                       .purpose = RandomPurpose::kData,
                                       .layer = which,
                                       .step = static_cast<uint64_t>(context_.mesh->world().rank()),
                                       .item = i})));
      }
    };
    fill(x_, 0);
    fill(dy_, 1);
    y_.resize(x_.size());
    dx_.resize(x_.size());
    return absl::OkStatus();
  }

  // Calls that differ in what is routed where.
  int64_t records() const { return spec_.routing.has_value() ? CallsOf(*spec_.routing) : 1; }
  // Of the last call.
  int64_t tokens() const { return gate_ == nullptr ? spec_.tokens : gate_->tokens(); }

  // One forward and one backward. `wrong` [pass] counts what differs from the first call with this
  // record. With `load`, which costs time, the router's counts are added to it.
  absl::Status Call(int64_t call, CallTimes& times, std::array<int64_t, 2>& wrong, Load* load) {
    const WorkspaceScope scratch(*context_.workspace);
    MOE_RETURN_IF_ERROR(reducer_->Begin());
    const int64_t record = call % records();
    if (record != record_) gate_->Assign(SlotsOf(spec_, context_.mesh->world(), record));
    record_ = record;
    const int64_t tokens = this->tokens();
    const Batch batch = {.first_global_token = context_.mesh->world().rank() * spec_.tokens};
    MoeLayerSaved<T> saved;
    RouterStats stats;
    MOE_RETURN_IF_ERROR(Pass(0, times, [&] {
      return layer_->Forward(View(x_, tokens), batch, View(y_, tokens), &saved,
                             load == nullptr ? nullptr : &stats);
    }));
    MOE_RETURN_IF_ERROR(Pass(1, times, [&] {
      return layer_->Backward(View(dy_, tokens), saved, 1.0f, View(dx_, tokens),
                              [](Parameter&) { return absl::OkStatus(); });
    }));
    if (load != nullptr) Add(stats, *load);
    Compare(record, tokens * hidden(), wrong);
    return absl::OkStatus();
  }

  int64_t bytes() const {
    const int64_t of_element = 4 + (std::is_same_v<T, float> ? 0 : int64_t{sizeof(T)}) +
                               (context_.numerics == Numerics::kLayoutInvariant ? 8 : 4);
    return context_.workspace->peak_bytes() + store_.total_size() * of_element +
           static_cast<int64_t>(4 * x_.size() * sizeof(T));
  }

 private:
  template <typename Work>
  absl::Status Pass(int pass, CallTimes& times, Work work) {
    MOE_RETURN_IF_ERROR(context_.mesh->world().Barrier());
    context_.clock->Reset();
    const int64_t start = NowNs();
    MOE_RETURN_IF_ERROR(Timed(context_, {.name = kPasses[pass]}, *context_.compute, work));
    MOE_RETURN_IF_ERROR(context_.exchange->Synchronize());
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    double* const part = times.data() + pass * kParts;
    for (int p = 0; p < kParts - 1; ++p) part[p] = context_.clock->seconds(kPhases[p]) * 1e6;
    part[kParts - 1] = static_cast<double>(NowNs() - start) * 1e-3;
    return absl::OkStatus();
  }
  int64_t hidden() const { return spec_.layer.router.hidden_size; }
  MatrixView<T> View(std::vector<T>& values, int64_t tokens) {
    return MatrixView<T>(values.data(), tokens, hidden());
  }
  static void Add(const RouterStats& stats, Load& load) {
    load.expert_count.resize(stats.expert_count.size(), 0);
    for (size_t e = 0; e < stats.expert_count.size(); ++e) {
      load.expert_count[e] += stats.expert_count[e];
    }
    load.dropped += stats.dropped_slots;
    ++load.calls;
  }
  void Compare(int64_t record, int64_t elements, std::array<int64_t, 2>& wrong) {
    const auto kept = first_.find(record);
    if (kept != first_.end()) {
      wrong[0] += Differ(y_, kept->second.first);
      wrong[1] += Differ(dx_, kept->second.second);
      return;
    }
    const int64_t bytes = 2 * elements * static_cast<int64_t>(sizeof(T));
    if (!first_.empty() && kept_bytes_ + bytes > kMostKeptBytes) return;
    kept_bytes_ += bytes;
    first_[record] = {{y_.begin(), y_.begin() + elements}, {dx_.begin(), dx_.begin() + elements}};
  }
  static int64_t Differ(const std::vector<T>& now, const std::vector<T>& first) {
    int64_t count = 0;
    for (size_t i = 0; i < first.size(); ++i) {
      count += std::memcmp(&now[i], &first[i], sizeof(T)) != 0;
    }
    return count;
  }

  const LayerSpec spec_;
  const Context context_;
  ParameterStore store_;
  std::unique_ptr<AssignedGate> gate_;  // with spec_.routing
  int64_t record_ = 0;                  // whose slots it has
  std::unique_ptr<MoeLayer<T>> layer_;
  std::unique_ptr<GradientReducer> reducer_;
  std::vector<T> x_, dy_, y_, dx_;
  std::map<int64_t, std::pair<std::vector<T>, std::vector<T>>> first_;  // y and dx by record
  int64_t kept_bytes_ = 0;
};

// [R][n] of all ranks.
absl::StatusOr<std::vector<CallTimes>> Gather(const std::vector<CallTimes>& mine,
                                              Communicator& world, Stream& stream) {
  std::vector<CallTimes> all(mine.size() * world.size());
  MOE_RETURN_IF_ERROR(world.AllGather<double>(
      {mine.data()->data(), mine.size() * std::tuple_size_v<CallTimes>},
      {all.data()->data(), all.size() * std::tuple_size_v<CallTimes>}, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return all;
}

// Per call, the slowest rank's time of a part.
std::vector<double> Slowest(const std::vector<CallTimes>& all, int ranks, int part) {
  const size_t calls = all.size() / ranks;
  std::vector<double> slowest(calls, 0);
  for (size_t i = 0; i < all.size(); ++i) {
    slowest[i % calls] = std::max(slowest[i % calls], all[i][part]);
  }
  return slowest;
}

double Sum(const std::vector<CallTimes>& all, int part) {
  double sum = 0;
  for (const CallTimes& call : all) sum += call[part];
  return sum;
}

// Sums and maxima over the world.
template <typename T>
absl::Status AddFigures(const LayerSpec& spec, const LayerOnRank<T>& layer, Load load,
                        Communicator& world, Stream& stream, LayerFigures& figures) {
  const int64_t experts = spec.layer.router.num_experts;
  load.expert_count.resize(spec.layer.router.num_outputs(), 0);
  int64_t peak = layer.bytes();
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(load.expert_count), ReduceOp::kSum, stream));
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&load.dropped, 1}, ReduceOp::kSum, stream));
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&peak, 1}, ReduceOp::kMax, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  const auto sum = [&](int64_t count) {
    return std::accumulate(load.expert_count.begin(), load.expert_count.begin() + count,
                           int64_t{0});
  };
  const int64_t slots = sum(static_cast<int64_t>(load.expert_count.size()));
  figures.drop_fraction =
      slots == 0 ? 0 : static_cast<double>(load.dropped) / static_cast<double>(slots);
  figures.max_vio = lm::MaxViolation({load.expert_count}, static_cast<int32_t>(experts));
  figures.dead_experts = lm::DeadExperts({load.expert_count}, static_cast<int32_t>(experts));
  figures.kept_rows = (sum(experts) - load.dropped) / std::max<int64_t>(1, load.calls);
  figures.peak_bytes = peak;
  return absl::OkStatus();
}

std::vector<LayerRow> Rows(const LayerSpec& spec, const LayerFigures& figures,
                           const std::vector<CallTimes>& all, const std::array<int64_t, 2>& wrong,
                           int ranks) {
  const double products = IsGated(spec.layer.activation) ? 3 : 2;
  const double operations = 2 * products * static_cast<double>(figures.kept_rows) *
                            static_cast<double>(spec.layer.router.hidden_size) *
                            static_cast<double>(spec.layer.ffn_hidden_size);
  std::vector<LayerRow> rows;
  for (int pass = 0; pass < 2; ++pass) {
    for (int p = 0; p < kParts; ++p) {
      const int part = pass * kParts + p;
      const int whole = pass * kParts + kParts - 1;
      const bool expert = p < kParts - 1 && kPhases[p] == Phase::kExpert;
      LayerRow row{.pass = kPasses[pass],
                   .phase = p < kParts - 1 ? moe::NameOf(kPhases[p]) : "all",
                   .time_us = Describe(Slowest(all, ranks, part)),
                   .share_pct = 100 * (Sum(all, part) / Sum(all, whole)),
                   .gflops_per_s = std::numeric_limits<double>::quiet_NaN(),
                   .wrong = wrong[pass]};
      if (expert) row.gflops_per_s = (pass + 1) * operations / row.time_us.p50 * 1e-3;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

// Forward and backward of each call, each of its slowest rank.
std::vector<double> Steps(const std::vector<CallTimes>& all, int ranks) {
  std::vector<double> steps = Slowest(all, ranks, kParts - 1);
  const std::vector<double> backward = Slowest(all, ranks, 2 * kParts - 1);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] += backward[i];
  return steps;
}

// Calls of the next batch; every rank decides on the same numbers.
int64_t NextBatch(const std::vector<CallTimes>& all, int ranks, const MeasureOptions& options) {
  if (Describe(Slowest(all, ranks, kParts - 1)).cv_pct <= options.max_noise_pct) return 0;
  const std::vector<double> steps = Steps(all, ranks);
  const double elapsed = std::accumulate(steps.begin(), steps.end(), 0.0);
  const double left = absl::ToDoubleMicroseconds(options.budget) / elapsed - 1;
  return left <= 0 ? 0
                   : static_cast<int64_t>(static_cast<double>(steps.size()) * std::min(1.0, left));
}

template <typename T>
absl::StatusOr<LayerResult> MeasureAs(const LayerSpec& spec, const MeasureOptions& options,
                                      Session& session) {
  const Context& context = session.context();
  Communicator& world = context.mesh->world();
  LayerOnRank<T> layer(spec, context);
  MOE_RETURN_IF_ERROR(layer.Setup(session.gradient_stream()));
  CallTimes times = {};
  std::array<int64_t, 2> wrong = {};
  Load load;
  // At least one: the results that others are compared with, and a workspace that has grown.
  const int64_t seen = std::min<int64_t>(layer.records(), options.iterations);
  for (int64_t call = 0; call < std::max<int64_t>(seen, options.warmup); ++call) {
    MOE_RETURN_IF_ERROR(layer.Call(call, times, wrong, call < seen ? &load : nullptr));
  }
  if (options.trace != nullptr) {
    options.trace->AddLane("compute", context.compute);
    context.clock->set_recorder(options.trace);
  }
  std::vector<CallTimes> mine;
  std::vector<CallTimes> all;
  int64_t tokens = 0;
  for (int64_t batch = options.iterations; batch > 0;
       batch = NextBatch(all, world.size(), options)) {
    for (int64_t i = 0; i < batch; ++i) {
      const auto call = static_cast<int64_t>(mine.size());
      if (options.trace != nullptr) options.trace->SetCall(static_cast<int32_t>(call));
      MOE_RETURN_IF_ERROR(layer.Call(call, times, wrong, nullptr));
      tokens += layer.tokens();
      mine.push_back(times);
    }
    MOE_ASSIGN_OR_RETURN(all, Gather(mine, world, *context.compute));
  }
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(wrong), ReduceOp::kSum, *context.compute));
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&tokens, 1}, ReduceOp::kSum, *context.compute));
  LayerResult result{.spec = spec, .backend = std::string(world.backend()), .ranks = world.size()};
  LayerFigures& figures = result.figures;
  MOE_RETURN_IF_ERROR(AddFigures(spec, layer, std::move(load), world, *context.compute, figures));
  const std::vector<double> steps = Steps(all, world.size());
  figures.iterations = static_cast<int64_t>(steps.size());
  figures.step_us = Describe(steps);
  figures.tokens_per_s =
      static_cast<double>(tokens) / std::accumulate(steps.begin(), steps.end(), 0.0) * 1e6;
  result.rows = Rows(spec, figures, all, wrong, world.size());
  return result;
}

absl::Status CheckSpec(const LayerSpec& spec, int ranks) {
  const auto bad = [](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("MeasureLayer: ", what...));
  };
  const RouterConfig& router = spec.layer.router;
  if (spec.dtype != DType::kFloat32 && spec.dtype != DType::kBFloat16) {
    return bad("type ", moe::NameOf(spec.dtype), ", expected f32 or bf16");
  }
  if (!spec.routing.has_value()) return absl::OkStatus();
  if (router.top_k < 1 || router.top_k > router.num_experts) {
    return bad("top_k is ", router.top_k, ", expected 1 to the ", router.num_experts, " experts");
  }
  if (spec.routing->kind == RoutingSpec::kMatrix) {
    return bad("routing is ", spec.routing->text, ", expected one of experts, tokens or a trace");
  }
  if (spec.routing->kind != RoutingSpec::kTrace) return absl::OkStatus();
  const Replay* const replay = spec.routing->replay.get();
  if (replay == nullptr || replay->ranks() != ranks || spec.expert_parallel_size != ranks ||
      replay->header().num_experts != router.num_experts) {
    return bad("the trace is not of ", ranks, " ranks that share ", router.num_experts, " experts");
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LayerResult> MeasureLayer(const LayerSpec& spec, const MeasureOptions& options,
                                         std::unique_ptr<Communicator> world) {
  LayerSpec whole = spec;
  if (whole.expert_parallel_size == 0) whole.expert_parallel_size = world->size();
  MOE_RETURN_IF_ERROR(CheckSpec(whole, world->size()));
  MOE_ASSIGN_OR_RETURN(const auto session,
                       Session::Create({.expert_parallel_size = whole.expert_parallel_size,
                                        .threads = whole.threads,
                                        .numerics = whole.numerics,
                                        .overlap_exchange = whole.layer.overlap_degree > 1},
                                       std::move(world)));
  if (whole.dtype == DType::kFloat32) return MeasureAs<float>(whole, options, *session);
  return MeasureAs<BFloat16>(whole, options, *session);
}

}  // namespace moe::bench
