#include "moe/bench/layer_bench.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "moe/bench/timing.h"
#include "moe/gradient_reducer.h"
#include "moe/moe_layer.h"
#include "moe/parameter.h"
#include "moe/session.h"

namespace moe::bench {
namespace {

constexpr Phase kPhases[] = {Phase::kGate, Phase::kPlan, Phase::kDispatch, Phase::kExpert,
                             Phase::kCombine};
constexpr int kParts = static_cast<int>(std::size(kPhases)) + 1;  // and all of them
constexpr const char* kPasses[] = {"forward", "backward"};

// Microseconds of one call on one rank: [pass][part].
using CallTimes = std::array<double, 2 * kParts>;

const char* DispatchName(DispatchAlgorithm algorithm) {
  if (algorithm == DispatchAlgorithm::kDirect) return "direct";
  return algorithm == DispatchAlgorithm::kHierarchical ? "hierarchical" : "staged";
}

// The layer of one rank with its tokens.
template <typename T>
class LayerOnRank {
 public:
  LayerOnRank(const LayerSpec& spec, const Context& context)
      : spec_(spec), context_(context), store_(DTypeOf<T>::value, spec.seed) {}

  absl::Status Setup(Stream& gradients) {
    const MoeLayerConfig config = {.router = {.num_experts = spec_.num_experts,
                                              .top_k = spec_.top_k,
                                              .hidden_size = spec_.hidden,
                                              .micro_batch_tokens = spec_.tokens},
                                   .ffn_hidden_size = spec_.ffn,
                                   .dispatcher = spec_.dispatcher};
    MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, "layer.", store_, context_));
    MOE_ASSIGN_OR_RETURN(reducer_, GradientReducer::Create({}, store_, context_, gradients));
    const auto fill = [&](std::vector<T>& values, uint32_t which) {
      values.resize(spec_.tokens * spec_.hidden);
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

  // One forward and one backward. wrong[pass] counts what differs from the first call.
  absl::Status Call(CallTimes& times, std::array<int64_t, 2>& wrong) {
    const WorkspaceScope scratch(*context_.workspace);
    MOE_RETURN_IF_ERROR(reducer_->Begin());
    MoeLayerSaved<T> saved;
    MOE_RETURN_IF_ERROR(
        Pass(0, times, [&] { return layer_->Forward(View(x_), {}, View(y_), &saved, nullptr); }));
    MOE_RETURN_IF_ERROR(Pass(1, times, [&] {
      return layer_->Backward(View(dy_), saved, 1.0f, View(dx_),
                              [](Parameter&) { return absl::OkStatus(); });
    }));
    if (first_y_.empty()) {
      first_y_ = y_;
      first_dx_ = dx_;
    }
    wrong[0] += Differ(y_, first_y_);
    wrong[1] += Differ(dx_, first_dx_);
    return absl::OkStatus();
  }

 private:
  template <typename Work>
  absl::Status Pass(int pass, CallTimes& times, Work work) {
    MOE_RETURN_IF_ERROR(context_.mesh->world().Barrier());
    context_.clock->Reset();
    const int64_t start = NowNs();
    MOE_RETURN_IF_ERROR(work());
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    double* const part = times.data() + pass * kParts;
    for (int p = 0; p < kParts - 1; ++p) part[p] = context_.clock->seconds(kPhases[p]) * 1e6;
    part[kParts - 1] = static_cast<double>(NowNs() - start) * 1e-3;
    return absl::OkStatus();
  }
  MatrixView<T> View(std::vector<T>& values) {
    return MatrixView<T>(values.data(), spec_.tokens, spec_.hidden);
  }
  static int64_t Differ(const std::vector<T>& a, const std::vector<T>& b) {
    int64_t count = 0;
    for (size_t i = 0; i < a.size(); ++i) count += std::memcmp(&a[i], &b[i], sizeof(T)) != 0;
    return count;
  }

  const LayerSpec spec_;
  const Context context_;
  ParameterStore store_;
  std::unique_ptr<MoeLayer<T>> layer_;
  std::unique_ptr<GradientReducer> reducer_;
  std::vector<T> x_, dy_, y_, dx_, first_y_, first_dx_;
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

std::vector<LayerRow> Rows(const LayerSpec& spec, const std::vector<CallTimes>& all,
                           const std::array<int64_t, 2>& wrong, const Communicator& world) {
  std::vector<LayerRow> rows;
  for (int pass = 0; pass < 2; ++pass) {
    for (int p = 0; p < kParts; ++p) {
      const int part = pass * kParts + p;
      const int whole = pass * kParts + kParts - 1;
      const bool expert = p < kParts - 1 && kPhases[p] == Phase::kExpert;
      LayerRow row{.pass = kPasses[pass],
                   .phase = p < kParts - 1 ? NameOf(kPhases[p]) : "all",
                   .spec = spec,
                   .backend = std::string(world.backend()),
                   .ranks = world.size(),
                   .iterations = static_cast<int64_t>(all.size()) / world.size(),
                   .time_us = Describe(Slowest(all, world.size(), part)),
                   .share_pct = 100 * (Sum(all, part) / Sum(all, whole)),
                   .gflops_per_s = std::numeric_limits<double>::quiet_NaN(),
                   .wrong = wrong[pass]};
      const double operations = (pass == 0 ? 6.0 : 12.0) * world.size() * spec.top_k *
                                static_cast<double>(spec.tokens * spec.hidden * spec.ffn);
      if (expert) row.gflops_per_s = operations / row.time_us.p50 * 1e-3;
      rows.push_back(std::move(row));
    }
  }
  return rows;
}

template <typename T>
absl::StatusOr<std::vector<LayerRow>> MeasureAs(const LayerSpec& spec,
                                                const MeasureOptions& options, Session& session) {
  const Context& context = session.context();
  Communicator& world = context.mesh->world();
  LayerOnRank<T> layer(spec, context);
  MOE_RETURN_IF_ERROR(layer.Setup(session.gradient_stream()));
  CallTimes call = {};
  std::array<int64_t, 2> wrong = {};
  // At least one: the results that others are compared with, and a workspace that has grown.
  for (int i = 0; i < std::max(1, options.warmup); ++i) {
    MOE_RETURN_IF_ERROR(layer.Call(call, wrong));
  }
  std::vector<CallTimes> mine;
  std::vector<CallTimes> all;
  int64_t batch = options.iterations;
  while (batch > 0) {
    for (int64_t i = 0; i < batch; ++i) {
      MOE_RETURN_IF_ERROR(layer.Call(call, wrong));
      mine.push_back(call);
    }
    MOE_ASSIGN_OR_RETURN(all, Gather(mine, world, *context.compute));
    // Every rank decides on the same numbers: the passes of rank 0 stand for the time that went by.
    const std::vector<double> calls = Slowest(all, world.size(), kParts - 1);
    const auto end = all.begin() + static_cast<int64_t>(mine.size());
    const std::vector<CallTimes> first_rank(all.begin(), end);
    const absl::Duration elapsed =
        absl::Microseconds(Sum(first_rank, kParts - 1) + Sum(first_rank, 2 * kParts - 1));
    const bool enough = Describe(calls).cv_pct <= options.max_noise_pct;
    const double left = absl::FDivDuration(options.budget - elapsed, elapsed);
    batch = enough || left <= 0
                ? 0
                : static_cast<int64_t>(static_cast<double>(mine.size()) * std::min(1.0, left));
  }
  MOE_RETURN_IF_ERROR(
      world.AllReduce<int64_t>(absl::MakeSpan(wrong), ReduceOp::kSum, *context.compute));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  return Rows(spec, all, wrong, world);
}

}  // namespace

absl::StatusOr<std::vector<LayerRow>> MeasureLayer(const LayerSpec& spec,
                                                   const MeasureOptions& options,
                                                   std::unique_ptr<Communicator> world) {
  const int ranks = world->size();
  MOE_ASSIGN_OR_RETURN(
      const auto session,
      Session::Create({.expert_parallel_size = ranks, .threads = spec.threads}, std::move(world)));
  if (spec.dtype == DType::kFloat32) return MeasureAs<float>(spec, options, *session);
  if (spec.dtype == DType::kBFloat16) return MeasureAs<BFloat16>(spec, options, *session);
  return absl::InvalidArgumentError(
      absl::StrCat("MeasureLayer: type ", moe::NameOf(spec.dtype), ", expected f32 or bf16"));
}

const std::vector<std::string>& LayerKeys() {
  static const std::vector<std::string> keys = {
      "schema",      "op",          "pass",           "phase",     "dtype",        "tokens",
      "topk",        "experts",     "hidden",         "ffn",       "seed",         "dispatch",
      "backend",     "ranks",       "threads",        "iters",     "time_us",      "time_us_min",
      "time_us_max", "time_us_p99", "time_us_cv_pct", "share_pct", "gflops_per_s", "nwrong",
      "status",      "error"};
  return keys;
}

std::vector<Cell> LayerCells(const LayerRow& row) {
  const LayerSpec& s = row.spec;
  return {"moe.bench.layer/1",
          "layer",
          row.pass,
          row.phase,
          moe::NameOf(s.dtype),
          s.tokens,
          int64_t{s.top_k},
          int64_t{s.num_experts},
          s.hidden,
          s.ffn,
          s.seed,
          DispatchName(s.dispatcher.algorithm),
          row.backend,
          int64_t{row.ranks},
          int64_t{s.threads},
          row.iterations,
          row.time_us.p50,
          row.time_us.min,
          row.time_us.max,
          row.time_us.p99,
          row.time_us.cv_pct,
          row.share_pct,
          row.gflops_per_s,
          row.wrong,
          row.wrong > 0 ? "wrong" : "ok",
          row.wrong > 0 ? Cell("results differ from the first call's") : Cell()};
}

std::string LayerHead() {
  return "# pass      phase          time     i_min     i_p99    i_cv%    share   GFLOP/s  #wrong\n"
         "#                          (us)      (us)      (us)      (%)      (%)                  "
         "\n";
}

std::string LayerLine(const LayerRow& row) {
  const std::string gflops = row.phase == "expert" ? absl::StrFormat("%9.1f", row.gflops_per_s)
                                                   : absl::StrFormat("%9s", "");
  return absl::StrFormat("  %-9s %-9s %9.1f %9.1f %9.1f %8.2f %8.1f %s %7d\n", row.pass, row.phase,
                         row.time_us.p50, row.time_us.min, row.time_us.p99, row.time_us.cv_pct,
                         row.share_pct, gflops, row.wrong);
}

}  // namespace moe::bench
