#include <algorithm>
#include <bit>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "moe/cli/verify/compare.h"
#include "moe/train/trainer.h"

namespace moe::verify {
namespace {

constexpr int64_t kNotHeld = std::numeric_limits<int64_t>::min();

// This rank's part of the results: every element's bits, or kNotHeld.
class Held {
 public:
  explicit Held(const std::vector<TensorSpec>& tensors) : tensors_(tensors) {
    for (const TensorSpec& spec : tensors) {
      place_[spec.name] = elements_;
      elements_ += spec.size();
    }
    bits_.assign(elements_, kNotHeld);
  }

  bool Has(const std::string& name) const { return place_.contains(name); }
  void Put(const std::string& name, int64_t first, absl::Span<const float> values) {
    const int64_t at = place_.at(name) + first;
    for (size_t i = 0; i < values.size(); ++i) bits_[at + i] = std::bit_cast<uint32_t>(values[i]);
  }

  // Collective. The largest bits over ranks, and the least: copies have equal ones.
  absl::StatusOr<RunResult> Gather(Communicator& world, Stream& stream) const {
    std::vector<int64_t> extremes = bits_;
    for (const int64_t b : bits_) extremes.push_back(b == kNotHeld ? kNotHeld : -b);
    MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>(absl::MakeSpan(extremes), ReduceOp::kMax, stream));
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    RunResult result;
    if (world.rank() != 0) return result;
    int64_t at = 0;
    for (const TensorSpec& spec : tensors_) {
      std::vector<float>& values = result.tensors.emplace_back();
      for (int64_t i = 0; i < spec.size(); ++i, ++at) {
        values.push_back(std::bit_cast<float>(static_cast<uint32_t>(extremes[at])));
        if (extremes[at] != -extremes[elements_ + at]) ++result.torn_replicas;
      }
    }
    return result;
  }

 private:
  const std::vector<TensorSpec>& tensors_;
  std::map<std::string, int64_t> place_;
  int64_t elements_ = 0;
  std::vector<int64_t> bits_;
};

// The rows of a call: its tokens, the first of which is `first` of all, and perhaps padding.
class CallRows {
 public:
  CallRows(int64_t first, int64_t tokens, int64_t hidden, bool padding) : hidden_(hidden) {
    for (int64_t t = 0; t < tokens; ++t) {
      if (padding && (first + t) % 3 == 0) mask_.push_back(1);
      row_.push_back(count());
      mask_.push_back(0);
    }
    if (padding) mask_.insert(mask_.end(), 2, 1);
    row_.push_back(count());
  }

  int64_t count() const { return std::ssize(mask_); }
  // Row of token `t`; of the last and one more, the number of rows.
  int64_t RowOf(int64_t t) const { return row_[t]; }
  const std::vector<uint8_t>& mask() const { return mask_; }

  // values [tokens, H] with NaN in rows of padding.
  template <typename T>
  std::vector<T> Padded(absl::Span<const float> values) const {
    std::vector<T> rows(mask_.size() * hidden_, T(std::numeric_limits<float>::quiet_NaN()));
    for (int64_t i = 0; i < std::ssize(values); ++i) {
      rows[row_[i / hidden_] * hidden_ + i % hidden_] = T(values[i]);
    }
    return rows;
  }
  // The same of results, in which padding must be 0.
  template <typename T>
  absl::StatusOr<std::vector<float>> WithoutPadding(const char* name,
                                                    absl::Span<const T> rows) const {
    std::vector<float> values;
    for (int64_t i = 0; i < std::ssize(rows); ++i) {
      const auto value = static_cast<float>(rows[i]);
      if (mask_[i / hidden_] == 0) {
        values.push_back(value);
      } else if (std::bit_cast<uint32_t>(value) != 0) {
        return absl::InternalError(absl::StrCat("RunLayer: ", name, " of padding in row ",
                                                i / hidden_, " is ", value, ", expected 0"));
      }
    }
    return values;
  }

 private:
  const int64_t hidden_;
  std::vector<uint8_t> mask_;
  std::vector<int64_t> row_;  // [tokens + 1]
};

template <typename T>
class RankRun {
 public:
  RankRun(const Problem& problem, const ProblemRunOptions& options, Trainer& trainer)
      : problem_(problem),
        fault_(options.fault),
        padding_(options.padding),
        trainer_(trainer),
        store_(trainer.parameters()),
        context_(trainer.context()),
        world_(context_.mesh->world()),
        held_(problem.tensors) {}

  absl::StatusOr<RunResult> Run(const MoeLayerConfig& config) {
    MOE_ASSIGN_OR_RETURN(layer_, MoeLayer<T>::Create(config, "", trainer_.parameters(), context_));
    MOE_RETURN_IF_ERROR(SetParameters());
    count_.assign(config.router.num_outputs(), 0);
    last_count_ = count_;
    MOE_RETURN_IF_ERROR(CountStep());
    MOE_RETURN_IF_ERROR(FullStep());
    MOE_RETURN_IF_ERROR(KeepBias());
    return held_.Gather(world_, *context_.host);
  }

 private:
  absl::Status SetParameters() {
    for (const auto& p : store_.parameters()) {
      const auto it = problem_.parameters.find(p->spec().name);
      if (it == problem_.parameters.end() || static_cast<int64_t>(it->second.size()) != p->size()) {
        return absl::InternalError("RunLayer: the layer has a parameter " + p->spec().name +
                                   " that the problem does not know");
      }
      MOE_RETURN_IF_ERROR(store_.WriteMaster(*p, it->second, StreamOf(*p, context_)));
    }
    return absl::OkStatus();
  }

  // This rank's micro-batches in its `index`-th round.
  MicroBatchRange Dealt(int64_t index) const {
    const Mesh& mesh = *context_.mesh;
    const MicroBatchRange mine =
        MicroBatchesOf(mesh.index(MeshGroup::kData), mesh.size(MeshGroup::kData), micro_batches());
    if (fault_ == Fault::kRankLocalBalance) return mine;
    const int64_t first = std::min(mine.begin + index, mine.end);
    return {first, std::min(first + 1, mine.end)};
  }

  // Runs the first step, which only counts.
  absl::Status CountStep() {
    const bool merged = fault_ == Fault::kRankLocalBalance;
    MOE_RETURN_IF_ERROR(trainer_.BeginEvaluation(merged ? world_.size() : micro_batches()));
    for (int64_t r = 0; r < trainer_.rounds(); ++r) {
      MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
      MOE_RETURN_IF_ERROR(Forward(Dealt(round.index()), 0, nullptr));
    }
    MOE_RETURN_IF_ERROR(trainer_.EndStep());
    return EndStep();
  }

  // Runs the second step. With kShuffledFloatSum every round is a step of the trainer's.
  absl::Status FullStep() {
    const bool every_round = fault_ == Fault::kShuffledFloatSum;
    const int64_t steps =
        every_round ? RoundsOf(context_.mesh->size(MeshGroup::kData), micro_batches()) : 1;
    for (int64_t s = 0; s < steps; ++s) {
      MOE_RETURN_IF_ERROR(trainer_.BeginStep());
      for (int64_t r = 0; r < trainer_.rounds(); ++r) {
        MOE_ASSIGN_OR_RETURN(const Round round, trainer_.BeginRound());
        MOE_RETURN_IF_ERROR(Forward(Dealt(s + r), 1, &round));
      }
      MOE_RETURN_IF_ERROR(trainer_.Reduce());
      MOE_RETURN_IF_ERROR(KeepGradients());
      trainer_.ForgetGradients();  // the bounds have room for what the grid takes
      MOE_RETURN_IF_ERROR(trainer_.EndStep());
    }
    if (every_round) ShuffleAndAdd();
    return EndStep();
  }

  // One call of the layer; in a round of a step, backward and results besides.
  absl::Status Forward(MicroBatchRange part, int64_t step, const Round* round) {
    const int64_t hidden = problem_.spec.layer.router.hidden_size;
    const int64_t first = problem_.micro_batch_offsets[part.begin];
    const int64_t tokens = problem_.micro_batch_offsets[part.end] - first;
    const CallRows rows(first, tokens, hidden, padding_);
    const auto of_call = [&](const std::vector<float>& all) {
      return rows.Padded<T>(absl::MakeConstSpan(all).subspan(first * hidden, tokens * hidden));
    };
    const std::vector<T> host_x = of_call(problem_.x), host_dy = of_call(problem_.dy);
    MOE_ASSIGN_OR_RETURN(const auto x, OnDevice<T>(host_x, context_));
    MOE_ASSIGN_OR_RETURN(const auto dy, OnDevice<T>(host_dy, context_));
    MOE_ASSIGN_OR_RETURN(const auto y, context_.workspace->Array<T>(rows.count() * hidden));
    MOE_ASSIGN_OR_RETURN(const auto dx, context_.workspace->Array<T>(rows.count() * hidden));
    std::vector<int64_t> sequences = {0};
    for (const int64_t s : problem_.sequence_offsets) {
      if (s > first && s <= first + tokens) sequences.push_back(rows.RowOf(s - first));
    }
    if (tokens == 0 && padding_) sequences.push_back(0);
    sequences.back() = rows.count();
    const int64_t bounds[] = {0, rows.count()};
    RouterStats stats;
    const Pass pass = {.context = context_,
                       .batch = {.sequence_offsets = sequences,
                                 .micro_batch_offsets = bounds,
                                 .first_global_token = first,
                                 .padding_mask = rows.mask(),
                                 .step = step},
                       .stash = round == nullptr ? nullptr : trainer_.PassOf(*round).stash,
                       .router_stats = {&stats, 1}};
    const auto view = [&](auto span) {
      return MatrixView(span.data(), rows.count(), hidden);
    };
    MOE_RETURN_IF_ERROR(layer_->Forward(pass, view(x), view(y)));
    if (round != nullptr) {
      MOE_RETURN_IF_ERROR(layer_->Backward(
          pass, view(dy), view(dx), [&](Parameter& p) { return trainer_.MarkReady(*round, p); }));
    }
    MOE_RETURN_IF_ERROR(context_.exchange->Synchronize());
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    MOE_RETURN_IF_ERROR(stats.Wait());
    for (size_t e = 0; e < count_.size(); ++e) count_[e] += stats.expert_count[e];
    if (round == nullptr || part.begin == part.end) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(const auto host_y, OnHost<T>(y, context_));
    MOE_ASSIGN_OR_RETURN(const auto host_dx, OnHost<T>(dx, context_));
    MOE_ASSIGN_OR_RETURN(const auto token_y, rows.WithoutPadding<T>("y", host_y));
    MOE_ASSIGN_OR_RETURN(const auto token_dx, rows.WithoutPadding<T>("dx", host_dx));
    held_.Put("y", first * hidden, token_y);
    held_.Put("dx", first * hidden, token_dx);
    const auto put = [&](const char* name, float value) {
      held_.Put(name, part.begin, {&value, 1});
      const std::vector<float> zeros(part.end - part.begin - 1);  // kRankLocalBalance merges some
      held_.Put(name, part.begin + 1, zeros);
    };
    put("aux_loss", static_cast<float>(stats.aux_loss));
    put("z_loss", static_cast<float>(stats.z_loss));
    put("dropped", static_cast<float>(stats.dropped_slots));
    return absl::OkStatus();
  }

  // Sums the counts of all ranks: integers, so the same everywhere.
  absl::Status EndStep() {
    MOE_RETURN_IF_ERROR(
        world_.AllReduce<int64_t>(absl::MakeSpan(count_), ReduceOp::kSum, *context_.host));
    MOE_RETURN_IF_ERROR(context_.host->Synchronize());
    std::vector<float> counts;
    for (const int64_t c : count_) counts.push_back(static_cast<float>(c));
    held_.Put("expert_count", 0, counts);
    MOE_RETURN_IF_ERROR(layer_->EndStep(fault_ == Fault::kStaleCount ? last_count_ : count_));
    last_count_ = count_;
    std::fill(count_.begin(), count_.end(), int64_t{0});
    return absl::OkStatus();
  }

  absl::StatusOr<std::vector<float>> GradientOf(const Parameter& parameter) const {
    const bool scaled =
        fault_ == Fault::kGradientScaleByEp && parameter.spec().holders == MeshGroup::kExpertData;
    const double scale = scaled ? 1.0 / context_.mesh->size(MeshGroup::kExpert) : 1.0;
    const WorkspaceScope scope(*context_.workspace), host_scope(*context_.host_workspace);
    MOE_ASSIGN_OR_RETURN(const auto scratch, context_.workspace->Array<float>(parameter.size()));
    MOE_ASSIGN_OR_RETURN(const absl::Span<const float> gradient,
                         trainer_.reducer().Gradient(parameter, scale, scratch, *context_.compute));
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    MOE_ASSIGN_OR_RETURN(const auto on_host, OnHost(gradient, context_));
    return std::vector<float>(on_host.begin(), on_host.end());
  }

  absl::Status KeepGradients() {
    for (const auto& p : store_.parameters()) {
      if (!p->spec().trainable) continue;
      MOE_ASSIGN_OR_RETURN(std::vector<float> gradient, GradientOf(*p));
      if (fault_ == Fault::kShuffledFloatSum) {
        round_gradients_[p->spec().name].push_back(std::move(gradient));
      } else {
        held_.Put(p->spec().name, 0, gradient);
      }
    }
    return absl::OkStatus();
  }

  absl::Status KeepBias() {
    for (const auto& p : store_.parameters()) {
      if (!p->spec().trainable) held_.Put(p->spec().name, 0, p->master());
    }
    return absl::OkStatus();
  }

  // The order of the rounds depends on the number of ranks, never on the rank that adds.
  void ShuffleAndAdd() {
    for (const auto& p : store_.parameters()) {
      if (!p->spec().trainable) continue;
      auto& rounds = round_gradients_[p->spec().name];
      RandomKey key = {.purpose = RandomPurpose::kShuffle,
                       .step = static_cast<uint64_t>(world_.size())};
      for (size_t i = rounds.size(); i > 1; --i) {
        key.item = i;
        std::swap(rounds[i - 1],
                  rounds[static_cast<size_t>(Uniform(key) * static_cast<double>(i))]);
      }
      std::vector<float> sum(p->size());
      for (const auto& round : rounds) {
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += round[i];
      }
      held_.Put(p->spec().name, 0, sum);
    }
  }

  int64_t micro_batches() const {
    return static_cast<int64_t>(problem_.spec.micro_batch_tokens.size());
  }

  const Problem& problem_;
  const Fault fault_;
  const bool padding_;
  Trainer& trainer_;
  const ParameterStore& store_;
  const Context& context_;
  Communicator& world_;
  Held held_;
  std::unique_ptr<MoeLayer<T>> layer_;
  // Counts of this step and of the step before, [outputs].
  std::vector<int64_t> count_, last_count_;
  // kShuffledFloatSum: gradients of every round by name.
  std::map<std::string, std::vector<std::vector<float>>> round_gradients_;
};

}  // namespace

absl::StatusOr<RunResult> RunLayer(const Problem& problem, const ProblemRunOptions& options,
                                   std::unique_ptr<Communicator> world) {
  const Layout& layout = options.layout;
  const Fault fault = options.fault;
  MOE_ASSIGN_OR_RETURN(MoeLayerConfig config, WithFault(problem.spec.layer, fault));
  config.dispatcher = {.algorithm = layout.dispatch, .node_size = layout.node_size()};
  config.overlap_degree = layout.overlap;
  // These faults give a rank one round in a step, whatever it runs in it.
  const bool one_round = fault == Fault::kRankLocalBalance || fault == Fault::kShuffledFloatSum;
  const auto micro_batches =
      static_cast<int64_t>(one_round ? world->size() : problem.spec.micro_batch_tokens.size());
  MOE_ASSIGN_OR_RETURN(const auto trainer,
                       Trainer::Create({.session = {.device = options.device,
                                                    .mesh = {.expert = layout.expert_parallel},
                                                    .numerics = options.numerics,
                                                    .bfloat16_order = options.bfloat16_order,
                                                    .overlap_exchange = layout.overlap > 1},
                                        .dtype = problem.spec.dtype,
                                        .micro_batches = micro_batches,
                                        .bucket_bytes = 4096},
                                       std::move(world)));
  auto result = WithStorageType(problem.spec.dtype, [&]<typename T>(T) {
    RankRun<T> run(problem, options, *trainer);
    return trainer->session().OrEnd([&] { return run.Run(config); });
  });
  if (result.ok()) result->bfloat16_order = trainer->bfloat16_order();
  return result;
}

}  // namespace moe::verify
