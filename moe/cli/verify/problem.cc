#include "moe/cli/verify/problem.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/rng.h"
#include "kernels/base/status_macros.h"

namespace moe::verify {
namespace {

constexpr int kMostDraws = 200;

// Value that DeepSeek-V3 and Megatron add to a sum of sigmoids.
constexpr double kSigmoidEpsilon = 1e-20;

ReferenceGate TopK(const RouterConfig& router, bool normalised) {
  return {.normalised = router.norm_topk_prob.value_or(normalised),
          .balance_choices = router.top_k};
}

ReferenceGate Grouped(ReferenceGate gate, const RouterConfig& router, int64_t group_sum) {
  gate.groups = router.num_groups;
  gate.group_top_k = router.group_top_k;
  gate.group_sum = group_sum;
  gate.scale = static_cast<double>(router.scaling_factor);
  gate.select_by_logits = gate.groups == 0 && !gate.expert_bias;
  return gate;
}

// Megatron's flags, every one at its own setting.
ReferenceGate Configured(const RouterConfig& router) {
  const bool sigmoid = router.score_function == ScoreFunction::kSigmoid;
  ReferenceGate gate = TopK(router, sigmoid ? router.top_k > 1 : !router.pre_softmax);
  gate.score = router.score_function;
  gate.epsilon = sigmoid ? kSigmoidEpsilon : 0;
  gate.expert_bias = router.expert_bias;
  const int32_t per_group = router.group_top_k > 0 ? router.top_k / router.group_top_k : 1;
  return Grouped(gate, router, std::max(1, per_group));
}

absl::StatusOr<ReferenceGate> GateOf(const RouterConfig& router) {
  const std::string& name = router.gate;
  ReferenceGate gate = TopK(router, true);
  if (name == "mixtral" || name == "qwen3") return gate;
  if (name == "qwen2" || name == "olmoe") return TopK(router, false);
  if (name == "topk") return Configured(router);
  if (name == "deepseek-v2") return Grouped(TopK(router, false), router, 1);
  if (name == "switch") {
    gate = TopK(router, false);
    gate.jitter = static_cast<double>(router.input_jitter);
  } else if (name == "gshard") {
    gate.sum_over_kept = true;
    gate.random_second = router.random_second_expert;
    gate.balance_choices = 1;
  } else if (name == "deepseek-v3") {
    gate.score = ScoreFunction::kSigmoid;
    gate.epsilon = kSigmoidEpsilon;
    gate.expert_bias = true;
    return Grouped(gate, router, 2);
  } else if (name == "longcat") {
    gate = TopK(router, false);
    gate.expert_bias = true;
    return Grouped(gate, router, 1);
  } else if (name == "gpt-oss") {
    gate.router_bias = true;
  } else if (name == "llama4") {
    gate = TopK(router, false);
    gate.score = ScoreFunction::kSigmoid;
    gate.weight_on_input = true;
  } else if (name == "expert-choice") {
    gate = {.selection = ReferenceSelection::kExpertChoice};
  } else if (name == "noisy-topk") {
    gate = {.selection = ReferenceSelection::kNoisyTopK};
  } else if (name == "sinkhorn") {
    gate = {.selection = ReferenceSelection::kSinkhorn,
            .score = router.top_k == 1 ? ScoreFunction::kSigmoid : ScoreFunction::kSoftmax};
  } else if (name == "sparsemixer") {
    gate = TopK(router, false);
    gate.near = 2 * static_cast<double>(router.router_jitter);
  } else {
    return absl::UnimplementedError(
        absl::StrCat("the reference has no gate '", name, "', expected a built-in one"));
  }
  return gate;
}

// type: kFloat32, kBFloat16 or kFloat16.
Storage StorageOf(DType type) {
  switch (type) {
    case DType::kBFloat16:
      return {.bits = 8, .least_log2 = -133};
    case DType::kFloat16:
      return {.bits = 11, .least_log2 = -24};
    default:
      return {};
  }
}

// Normal numbers of one tensor.
class Draw {
 public:
  Draw(const Problem& problem, uint32_t tensor)
      : key_{.seed = problem.data_seed, .purpose = RandomPurpose::kData, .layer = tensor} {}

  std::vector<float> Normals(int64_t count, double mean, double deviation, DType type) {
    const Storage storage = StorageOf(type);
    std::vector<float> out;
    for (int64_t i = 0; i < count; ++i) {
      key_.item = static_cast<uint64_t>(i);
      const double v = mean + deviation * Normal(key_);
      out.push_back(static_cast<float>(RoundTo(storage, v)));
    }
    return out;
  }

 private:
  RandomKey key_;
};

void CutBatch(Problem& problem) {
  problem.micro_batch_offsets = problem.sequence_offsets = {0};
  for (const int64_t tokens : problem.spec.micro_batch_tokens) {
    const int64_t begin = problem.micro_batch_offsets.back();
    problem.micro_batch_offsets.push_back(begin + tokens);
    // Two sequences, of two tokens at least: Sinkhorn makes all experts of a lone token equal.
    if (tokens >= 4) problem.sequence_offsets.push_back(begin + std::max<int64_t>(2, tokens / 3));
    if (tokens >= 1) problem.sequence_offsets.push_back(begin + tokens);
  }
}

void AddTensor(Problem& problem, TensorSpec spec) {
  spec.family = spec.family.empty() ? spec.name : spec.family;
  problem.tensors.push_back(std::move(spec));
}

// Parameters of one feed-forward network, with their names in MoeLayer.
void AddNetwork(Problem& problem, const std::string& prefix, int64_t expert, int64_t ffn,
                bool biases) {
  const MoeLayerConfig& layer = problem.spec.layer;
  const int64_t hidden = layer.router.hidden_size;
  const std::string up = IsGated(layer.activation) ? "gate_up_proj" : "up_proj";
  const int64_t up_rows = IsGated(layer.activation) ? 2 * ffn : ffn;
  const auto add = [&](const std::string& name, int64_t rows, int64_t cols) {
    AddTensor(problem, {.name = prefix + name,
                        .family = (expert < 0 ? prefix : std::string("experts.")) + name,
                        .expert = expert,
                        .rows = rows,
                        .cols = cols});
  };
  add(up + ".weight", up_rows, hidden);
  if (biases) add(up + ".bias", 1, up_rows);
  add("down_proj.weight", hidden, ffn);
  if (biases) add("down_proj.bias", 1, hidden);
}

void AddTensors(Problem& problem, const ReferenceConfig& config) {
  const auto micro_batches = static_cast<int64_t>(problem.spec.micro_batch_tokens.size());
  const int64_t hidden = config.hidden;
  const bool noisy = config.gate.selection == ReferenceSelection::kNoisyTopK;
  for (const char* name : {"y", "dx"}) {
    AddTensor(
        problem,
        {.name = name, .kind = TensorKind::kTokens, .rows = problem.tokens(), .cols = hidden});
  }
  AddTensor(problem,
            {.name = "gate.weight", .rows = config.outputs() * (noisy ? 2 : 1), .cols = hidden});
  if (config.gate.router_bias) AddTensor(problem, {.name = "gate.bias", .cols = config.outputs()});
  for (int64_t e = 0; e < config.experts; ++e) {
    AddNetwork(problem, absl::StrCat("experts.", e, "."), e, config.ffn, config.projection_biases);
  }
  if (config.shared_ffn > 0) {
    AddNetwork(problem, "shared_expert.", -1, config.shared_ffn, false);
    if (config.shared_gated) {
      AddTensor(problem, {.name = "shared_expert_gate.weight", .cols = hidden});
    }
  }
  for (const char* name : {"aux_loss", "z_loss", "dropped"}) {
    AddTensor(problem, {.name = name, .kind = TensorKind::kPerMicroBatch, .rows = micro_batches});
  }
  AddTensor(problem,
            {.name = "expert_count", .kind = TensorKind::kPerExpert, .cols = config.outputs()});
  if (config.gate.expert_bias) {
    AddTensor(problem, {.name = "gate.e_score_correction_bias",
                        .kind = TensorKind::kPerExpert,
                        .cols = config.outputs()});
  }
}

// Copies one expert's row, or element, to another's: equal logits.
void Tie(std::vector<float>& values, int64_t cols, int64_t from, int64_t to) {
  std::copy_n(values.begin() + from * cols, cols, values.begin() + to * cols);
}

// How the values of a parameter are drawn.
struct Spread {
  double mean = 0;
  double deviation = 1;
  bool float32 = false;  // in float32 whatever the storage type is
};

Spread SpreadOf(const TensorSpec& spec, const ReferenceConfig& config) {
  const double by_input = 1 / std::sqrt(static_cast<double>(spec.cols));
  if (spec.name == "gate.e_score_correction_bias") {
    // Mostly negative v = s + b, and near enough to s to change the selection.
    const bool sigmoid = config.gate.score == ScoreFunction::kSigmoid;
    const double scale = sigmoid ? 1.0 : 1.0 / static_cast<double>(config.outputs());
    return {-0.75 * scale, 0.25 * scale, true};
  }
  if (absl::EndsWith(spec.name, "bias")) return {0, 0.2, true};
  if (spec.name == "gate.weight") {
    // Sinkhorn stops at a change of 1e-4: nearly even scores get there in few iterations, whose
    // rounding bound stays below it.
    const bool sinkhorn = config.gate.selection == ReferenceSelection::kSinkhorn;
    return {0, by_input * (sinkhorn ? 0.1 : 1.5)};
  }
  const bool clamped = config.activation == Activation::kClampedSwiGlu;
  if (clamped && absl::EndsWith(spec.name, "up_proj.weight")) {
    return {0, by_input * 4};  // some reach the clamps at 7
  }
  return {0, by_input};
}

void DrawParameters(Problem& problem, const ReferenceConfig& config) {
  uint32_t tensor = 2;
  const bool tied = config.experts >= 3;
  for (const TensorSpec& spec : problem.tensors) {
    if (spec.kind != TensorKind::kParameter && spec.name != "gate.e_score_correction_bias") {
      continue;
    }
    const Spread spread = SpreadOf(spec, config);
    std::vector<float> values = Draw(problem, tensor++)
                                    .Normals(spec.size(), spread.mean, spread.deviation,
                                             spread.float32 ? DType::kFloat32 : problem.spec.dtype);
    if (tied && spec.name == "gate.weight") Tie(values, config.hidden, 1, config.experts - 1);
    if (tied && (spec.name == "gate.bias" || spec.name == "gate.e_score_correction_bias")) {
      Tie(values, 1, 1, config.experts - 1);
    }
    problem.parameters[spec.name] = std::move(values);
  }
}

void DrawTokens(Problem& problem, int64_t hidden) {
  problem.x = Draw(problem, 0).Normals(problem.tokens() * hidden, 0, 1, problem.spec.dtype);
  problem.dy = Draw(problem, 1).Normals(problem.tokens() * hidden, 0, 1, problem.spec.dtype);
  for (size_t b = 0; b + 1 < problem.micro_batch_offsets.size(); ++b) {
    const int64_t first = problem.micro_batch_offsets[b], end = problem.micro_batch_offsets[b + 1];
    if (end - first >= 3) Tie(problem.x, hidden, first, end - 1);
  }
}

Grid<double> GridOf(const std::vector<float>& values, int64_t rows, int64_t cols) {
  Grid<double> grid(rows, cols);
  std::copy(values.begin(), values.end(), grid.data.begin());
  return grid;
}

// Location of a tensor in the reference. Weights: Grid<double>, gradients: Grid<Bounded>.
template <typename Number>
Grid<Number>* Find(const TensorSpec& spec, LayerWeights<Number>& weights) {
  if (spec.name == "gate.weight") return &weights.router;
  if (spec.name == "gate.bias") return &weights.router_bias;
  if (spec.name == "shared_expert_gate.weight") return &weights.shared_gate;
  const absl::string_view name = spec.name;
  ExpertWeights<Number>& network = spec.expert < 0 ? weights.shared : weights.experts[spec.expert];
  if (absl::EndsWith(name, "down_proj.weight")) return &network.down;
  if (absl::EndsWith(name, "down_proj.bias")) return &network.down_bias;
  if (absl::EndsWith(name, "up_proj.weight")) return &network.gate_up;
  return &network.gate_up_bias;
}

std::vector<Bounded> Exact(const std::vector<int64_t>& values) {
  std::vector<Bounded> out;
  for (const int64_t v : values) out.emplace_back(static_cast<double>(v));
  return out;
}

std::vector<Bounded> ExpectedOf(const TensorSpec& spec, ReferenceResult& result,
                                const ReferenceState& state) {
  if (spec.name == "y") return result.y.data;
  if (spec.name == "dx") return result.dx.data;
  if (spec.name == "aux_loss") return result.aux_loss;
  if (spec.name == "z_loss") return result.z_loss;
  if (spec.name == "dropped") return Exact(result.dropped);
  if (spec.name == "expert_count") return Exact(result.expert_count);
  if (spec.name == "gate.e_score_correction_bias") {
    std::vector<Bounded> out;
    for (const double b : state.expert_bias) out.push_back(Rounded(b, 0, 2));
    return out;
  }
  return Find(spec, result.gradients)->data;
}

// Runs both steps. Returns the decision that is not certain, or "".
std::string RunReferenceSteps(const ReferenceConfig& config, Problem& problem) {
  LayerWeights<double> weights;
  weights.experts.resize(config.experts);
  for (const TensorSpec& spec : problem.tensors) {
    if (spec.kind != TensorKind::kParameter) continue;
    *Find(spec, weights) = GridOf(problem.parameters[spec.name], spec.rows, spec.cols);
  }
  ReferenceState state;
  if (config.gate.expert_bias) {
    const std::vector<float>& bias = problem.parameters["gate.e_score_correction_bias"];
    state.expert_bias.assign(bias.begin(), bias.end());
  }
  ReferenceBatch batch = {.micro_batch_offsets = problem.micro_batch_offsets,
                          .sequence_offsets = problem.sequence_offsets,
                          .x = GridOf(problem.x, problem.tokens(), config.hidden),
                          .dy = GridOf(problem.dy, problem.tokens(), config.hidden)};
  ReferenceResult result = RunReference(config, weights, state, batch);
  if (!result.undecided.empty()) return absl::StrCat("step 0, ", result.undecided);
  EndReferenceStep(config, result.expert_count, state);
  batch.step = 1;
  result = RunReference(config, weights, state, batch);
  if (!result.undecided.empty()) return absl::StrCat("step 1, ", result.undecided);
  EndReferenceStep(config, result.expert_count, state);
  problem.token_experts = result.choices;
  problem.reference.clear();
  for (const TensorSpec& spec : problem.tensors) {
    problem.reference.push_back(ExpectedOf(spec, result, state));
  }
  return "";
}

}  // namespace

std::vector<int64_t> UnevenMicroBatches(int64_t count, int64_t most, const std::string& gate) {
  constexpr int64_t kSevenths[] = {7, 5, 3, 6, 1, 4, 0, 5, 2};
  std::vector<int64_t> tokens;
  for (int64_t m = 0; m < count; ++m) {
    const int64_t part = kSevenths[m % std::size(kSevenths)];
    int64_t length = (most * part + 6) / 7;
    if (gate == "sinkhorn" && length == 1) length = 2;
    tokens.push_back(length);
  }
  return tokens;
}

absl::StatusOr<ReferenceConfig> ReferenceConfigOf(const ProblemSpec& spec) {
  const RouterConfig& router = spec.layer.router;
  absl::StatusOr<ReferenceGate> gate = GateOf(router);
  if (!gate.ok()) return gate.status();
  return ReferenceConfig{.experts = router.num_experts,
                         .zero_experts = router.num_zero_experts,
                         .top_k = router.top_k,
                         .hidden = router.hidden_size,
                         .ffn = spec.layer.ffn_hidden_size,
                         .shared_ffn = spec.layer.shared_expert_ffn_hidden_size,
                         .shared_gated = spec.layer.gated_shared_expert,
                         .projection_biases = spec.layer.projection_biases,
                         .activation = spec.layer.activation.kind,
                         .gate = *gate,
                         .capacity_factor = router.capacity_factor,
                         .drop_by_position = router.drop_policy == DropPolicy::kPosition,
                         .token_group = router.token_group.tokens,
                         .balance = router.load_balancing,
                         .aux_coeff = static_cast<double>(router.aux_loss_coeff),
                         .z_coeff = static_cast<double>(router.z_loss_coeff),
                         .bias_update_rate = static_cast<double>(router.bias_update_rate),
                         .seed = router.seed,
                         .storage = StorageOf(spec.dtype)};
}

absl::StatusOr<Problem> DrawProblem(const ProblemSpec& spec, uint64_t data_seed) {
  MOE_RETURN_IF_ERROR(ValidateRouterConfig(spec.layer.router));
  MOE_ASSIGN_OR_RETURN(const ReferenceConfig config, ReferenceConfigOf(spec));
  Problem problem;
  problem.spec = spec;
  problem.data_seed = data_seed;
  CutBatch(problem);
  AddTensors(problem, config);
  DrawParameters(problem, config);
  DrawTokens(problem, config.hidden);
  return problem;
}

absl::StatusOr<Problem> MakeProblem(const ProblemSpec& spec) {
  MOE_RETURN_IF_ERROR(ValidateRouterConfig(spec.layer.router));
  MOE_ASSIGN_OR_RETURN(const ReferenceConfig config, ReferenceConfigOf(spec));
  std::string reason;
  for (uint64_t draw = 0; draw < kMostDraws; ++draw) {
    MOE_ASSIGN_OR_RETURN(Problem problem, DrawProblem(spec, spec.seed + draw));
    const std::string undecided = RunReferenceSteps(config, problem);
    if (undecided.empty()) {
      problem.redrawn = reason;
      return problem;
    }
    if (reason.empty()) reason = absl::StrCat("seed ", spec.seed, ", ", undecided);
  }
  return absl::FailedPreconditionError(absl::StrCat(
      "no data in ", kMostDraws, " seeds whose routing float32 rounding leaves alone (", reason,
      "), expected fewer tokens or experts"));
}

}  // namespace moe::verify
