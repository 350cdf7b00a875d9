#include "moe/cli/measure/layer_bench.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include <absl/strings/str_cat.h>

#include "dispatch/dispatcher.h"
#include "kernels/activation/activation_kind.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/measure/layer_on_rank.h"
#include "moe/lm/step_totals.h"

namespace moe::measure {

namespace {

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

// Sums and maxima over the world, without times; `peak` is of this rank.
absl::StatusOr<LayerFigures> FiguresOf(const RouterConfig& router, RouterLoad load, int64_t peak,
                                       Communicator& world, Stream& stream) {
  const int64_t experts = router.num_experts;
  load.expert_count.resize(router.num_outputs(), 0);
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
  LayerFigures figures;
  figures.drop_fraction =
      slots == 0 ? 0 : static_cast<double>(load.dropped) / static_cast<double>(slots);
  figures.max_vio = lm::MaxViolation({load.expert_count}, static_cast<int32_t>(experts));
  figures.dead_experts = lm::DeadExperts({load.expert_count}, static_cast<int32_t>(experts));
  figures.kept_rows = (sum(experts) - load.dropped) / std::max<int64_t>(1, load.calls);
  figures.peak_bytes = peak;
  return figures;
}

std::vector<LayerRow> Rows(const LayerSpec& spec, const LayerFigures& figures,
                           const std::vector<CallTimes>& all, const std::array<int64_t, 2>& wrong,
                           int ranks) {
  const double products = IsGated(spec.layer.activation) ? 3 : 2;
  const double operations = 2 * products * static_cast<double>(figures.kept_rows) *
                            static_cast<double>(spec.layer.router.hidden_size) *
                            static_cast<double>(spec.layer.ffn_hidden_size);
  std::vector<LayerRow> rows;
  for (int pass = 0; pass < (spec.forward_only ? 1 : 2); ++pass) {
    for (int p = 0; p < kLayerParts; ++p) {
      const int part = pass * kLayerParts + p;
      const int whole = pass * kLayerParts + kLayerParts - 1;
      const bool expert = p < kLayerParts - 1 && kLayerPhases[p] == Phase::kExpert;
      LayerRow row{.pass = kPasses[pass],
                   .phase = p < kLayerParts - 1 ? moe::NameOf(kLayerPhases[p]) : "all",
                   .time_us = Describe(Slowest(all, ranks, part)),
                   .share_pct = 100 * (Sum(all, part) / Sum(all, whole)),
                   .gflops_per_s = kNone,
                   .wrong = wrong[pass]};
      if (expert) row.gflops_per_s = (pass + 1) * operations / row.time_us.p50 * 1e-3;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

// The passes of each call, each of its slowest rank; one that did not run took no time.
std::vector<double> Steps(const std::vector<CallTimes>& all, int ranks) {
  std::vector<double> steps = Slowest(all, ranks, kLayerParts - 1);
  const std::vector<double> backward = Slowest(all, ranks, 2 * kLayerParts - 1);
  for (size_t i = 0; i < steps.size(); ++i) steps[i] += backward[i];
  return steps;
}

// Calls of the next batch; every rank decides on the same numbers.
int64_t NextBatch(const std::vector<CallTimes>& all, int ranks, const MeasureOptions& options) {
  const std::vector<double> steps = Steps(all, ranks);
  if (Describe(steps).cv_pct <= options.max_noise_pct) return 0;
  const double elapsed = std::accumulate(steps.begin(), steps.end(), 0.0);
  const double left = absl::ToDoubleMicroseconds(options.budget) / elapsed - 1;
  return left <= 0 ? 0
                   : static_cast<int64_t>(static_cast<double>(steps.size()) * std::min(1.0, left));
}

template <typename T>
absl::StatusOr<LayerResult> MeasureOn(LayerOnRank<T>& layer, const LayerSpec& spec,
                                      const MeasureOptions& options, const Context& context) {
  Communicator& world = context.mesh->world();
  MOE_RETURN_IF_ERROR(layer.Setup());
  CallTimes times = {};
  std::array<int64_t, 2> wrong = {};
  RouterLoad load;
  // At least one call: its results are what others are compared with, and the workspace has grown.
  const int64_t seen = std::min<int64_t>(layer.records(), options.iterations);
  for (int64_t call = 0; call < std::max<int64_t>(seen, options.warmup); ++call) {
    MOE_RETURN_IF_ERROR(layer.Call(call, times, wrong, call < seen ? &load : nullptr));
  }
  wrong = {};
  if (options.trace != nullptr) {
    options.trace->AddLane("compute", context.compute);
    if (context.exchange != context.compute) options.trace->AddLane("exchange", context.exchange);
    context.clock->set_recorder(options.trace);
  }
  std::vector<CallTimes> mine;
  std::vector<CallTimes> all;
  int64_t tokens = 0;
  for (int64_t batch = options.iterations; batch > 0;
       batch = NextBatch(all, world.size(), options)) {
    for (int64_t i = 0; i < batch; ++i) {
      const auto call = static_cast<int64_t>(mine.size());
      MOE_RETURN_IF_ERROR(layer.Call(call, times, wrong, nullptr));
      if (context.mesh->index(MeshGroup::kTensor) == 0) tokens += layer.tokens();
      mine.push_back(times);
    }
    MOE_ASSIGN_OR_RETURN(all, Gather(mine, world, *context.host));
  }
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(wrong), ReduceOp::kSum, *context.host));
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&tokens, 1}, ReduceOp::kSum, *context.host));
  LayerResult result{.spec = spec, .backend = std::string(world.backend()), .ranks = world.size()};
  LayerFigures& figures = result.figures;
  MOE_ASSIGN_OR_RETURN(
      figures, FiguresOf(spec.layer.router, std::move(load), layer.bytes(), world, *context.host));
  const std::vector<double> steps = Steps(all, world.size());
  figures.iterations = static_cast<int64_t>(steps.size());
  figures.step_us = Describe(steps);
  figures.tokens_per_s =
      static_cast<double>(tokens) / std::accumulate(steps.begin(), steps.end(), 0.0) * 1e6;
  result.rows = Rows(spec, figures, all, wrong, world.size());
  return result;
}

template <typename T>
absl::StatusOr<LayerResult> MeasureAs(const LayerSpec& spec, const MeasureOptions& options,
                                      Trainer& trainer) {
  LayerOnRank<T> layer(spec, trainer);
  return trainer.session().OrEnd(
      [&] { return MeasureOn(layer, spec, options, trainer.context()); });
}

absl::Status CheckSpec(const LayerSpec& spec, int ranks) {
  const auto bad = [](auto&&... what) {
    return absl::InvalidArgumentError(absl::StrCat("MeasureLayer: ", what...));
  };
  const RouterConfig& router = spec.layer.router;
  if (!IsStorageType(spec.trainer.dtype)) {
    return bad("type ", moe::NameOf(spec.trainer.dtype), ", expected f32, bf16 or f16");
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
  const MeshShape& mesh = spec.trainer.session.mesh;
  if (replay == nullptr || replay->ranks() != ranks || mesh.expert != ranks || mesh.tensor > 1 ||
      mesh.expert_tensor > 1 || replay->header().num_experts != router.num_experts) {
    return bad("the trace is not of ", ranks, " ranks that share ", router.num_experts, " experts");
  }
  return absl::OkStatus();
}

}  // namespace

int AllShareExperts(const MeshShape& mesh, int ranks) {
  const int share = std::max(1, mesh.expert_tensor);
  return ranks % share == 0 ? ranks / share : 1;
}

absl::StatusOr<LayerResult> MeasureLayer(const LayerSpec& spec, const MeasureOptions& options,
                                         std::unique_ptr<Communicator> world) {
  LayerSpec whole = spec;
  SessionOptions& session = whole.trainer.session;
  if (session.mesh.expert == 0) session.mesh.expert = AllShareExperts(session.mesh, world->size());
  session.overlap_exchange = whole.layer.overlap_degree > 1;
  MOE_RETURN_IF_ERROR(CheckSpec(whole, world->size()));
  whole.trainer.micro_batches = world->size() / session.mesh.tensor;  // one of each tensor group
  MOE_ASSIGN_OR_RETURN(const auto trainer, Trainer::Create(whole.trainer, std::move(world)));
  auto result = WithStorageType(
      whole.trainer.dtype, [&]<typename T>(T) { return MeasureAs<T>(whole, options, *trainer); });
  if (result.ok()) result->bfloat16_order = trainer->bfloat16_order();
  return result;
}

Cell BFloat16OrderCell(std::optional<BFloat16Order> order) {
  return Cell::TextIf(order.has_value(),
                      moe::NameOf(order.value_or(BFloat16Order()), kBFloat16OrderWords));
}

Fields LayerFields(const LayerResult& result, const LayerRow& row) {
  const LayerSpec& s = result.spec;
  const SessionOptions& session = s.trainer.session;
  const RouterConfig& router = s.layer.router;
  const LayerFigures& f = result.figures;
  Fields fields = {
      {"schema", "moe.bench.layer/1"},
      {"op", "layer"},
      {"pass", row.pass},
      {"phase", row.phase},
      {"dtype", moe::NameOf(s.trainer.dtype)},
      {"tokens", s.tokens},
      {"topk", int64_t{router.top_k}},
      {"experts", int64_t{router.num_experts}},
      {"hidden", router.hidden_size},
      {"ffn", s.layer.ffn_hidden_size},
      {"router", Cell::TextIf(!s.routing.has_value(), router.gate)},
      {"routing", Cell::TextIf(s.routing.has_value(), s.routing.value_or(RoutingSpec()).text)},
      {"capacity_factor", router.capacity_factor.value_or(kNone)},
      {"overlap_degree", int64_t{s.layer.overlap_degree}},
      {"numerics", moe::NameOf(s.trainer.session.numerics, kNumericsWords)},
      {"bf16_order", BFloat16OrderCell(result.bfloat16_order)},
      {"seed", s.trainer.seed},
      {"dispatch", moe::NameOf(s.layer.dispatcher.algorithm, kDispatchWords)},
      {"backend", result.backend},
      {"ranks", int64_t{result.ranks}},
      {"expert_parallel_size", int64_t{session.mesh.expert}},
      {"tensor_parallel_size", int64_t{session.mesh.tensor}},
      {"expert_tensor_parallel_size", int64_t{session.mesh.expert_tensor}},
      {"device", moe::NameOf(session.device, kDeviceWords)},
      {"threads", int64_t{session.threads}}};
  AddTimes(row.time_us, f.iterations, fields);
  fields.insert(fields.end(), {{"share_pct", row.share_pct},
                               {"gflops_per_s", row.gflops_per_s},
                               {"step_us", f.step_us.p50},
                               {"tokens_per_s", f.tokens_per_s},
                               {"drop_fraction", f.drop_fraction},
                               {"max_vio", f.max_vio},
                               {"dead_experts", int64_t{f.dead_experts}},
                               {"peak_bytes", f.peak_bytes}});
  AddVerdict(row.wrong, "results differ from the first call's", fields);
  return fields;
}

absl::Span<const Column> LayerColumns() {
  static constexpr Column kColumns[] = {{"pass", "pass", "", -9},
                                        {"phase", "phase", "", -9},
                                        {"time_us", "time", "(us)", 9, 1},
                                        {"time_us_min", "i_min", "(us)", 9, 1},
                                        {"time_us_p99", "i_p99", "(us)", 9, 1},
                                        {"time_us_cv_pct", "i_cv%", "(%)", 8, 2},
                                        {"share_pct", "share", "(%)", 8, 1},
                                        {"gflops_per_s", "GFLOP/s", "", 9, 1},
                                        {"nwrong", "#wrong", "", 7}};
  return kColumns;
}

}  // namespace moe::measure
