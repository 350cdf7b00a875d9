#include "moe/cli/sweep/sweep_plan.h"

#include <algorithm>
#include <set>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "gating/router_config.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/metrics_file.h"
#include "moe/cli/measure/routing_spec.h"
#include "moe/cli/measure/traffic.h"
#include "moe/lm/train_config.h"
#include "moe/plan/model_cost.h"

namespace moe::cli {

namespace {

// Main axes are part of every label.
bool InEveryLabel(absl::string_view name) {
  return name == "num-experts" || name == "moe-router-topk" || name == "moe-expert-capacity-factor";
}

// "1e-3" and "0.001" are one value.
std::string Canonical(const Setting& setting, const std::string& text) {
  double number = 0;
  const bool numeric = setting.kind == Kind::kReal && absl::SimpleAtod(text, &number);
  return numeric ? measure::Cell(number).text() : text;
}

// The pairs of --with, by the names of their flags; one that is unknown stays as it is.
std::vector<std::pair<std::string, std::string>> CoupledFlags(const Settings& settings) {
  std::vector<std::pair<std::string, std::string>> pairs;
  if (settings.empty("with")) return pairs;
  for (const std::string& text : settings.value("with").texts) {
    const std::pair<std::string, std::string> flags = absl::StrSplit(text, absl::MaxSplits(':', 1));
    const auto name = [&](const std::string& flag) {
      const Setting* const found = settings.Find(flag);
      return found == nullptr ? flag : found->name;
    };
    pairs.emplace_back(name(flags.first), name(flags.second));
  }
  return pairs;
}

bool IsCoupled(const Settings& settings, absl::string_view flag) {
  for (const auto& [first, second] : CoupledFlags(settings)) {
    if (flag == first || flag == second) return true;
  }
  return false;
}

absl::Status NamedAxis(const char* name, const absl::Status& status) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", status.message()));
}

// A flag that is given but not read would misstate what is measured.
absl::Status RefuseUnread(const Settings& settings, Measure measure) {
  for (const Setting& s : PointSettings().rows()) {
    if (!IsOfOther(measure, s) || settings.value(s.name).origin != Origin::kFlag) continue;
    const bool layer = measure == Measure::kLayer;
    return WrongValue(settings, s.name,
                      absl::StrCat("none with --measure ", layer ? "layer" : "train",
                                   ": it is of --measure ", layer ? "train" : "layer"));
  }
  return absl::OkStatus();
}

// A given routing replaces the gate, so that the gate and its options would have no effect.
absl::Status RefuseGateWithRouting(const Settings& settings) {
  if (!settings.given("routing")) return absl::OkStatus();
  for (const Setting& s : settings.table()) {
    if (!s.is(kOfGate) || !settings.given(s.name)) continue;
    return WrongValue(settings, s.name,
                      "none with --routing, which says what experts the tokens are given");
  }
  return absl::OkStatus();
}

absl::Status CheckRouting(const std::string& value) {
  if (absl::StartsWith(value, "matrix:") || absl::StartsWith(value, "trace:")) {
    return WrongFlag("--routing", absl::StrCat("'", value, "'"),
                     "uniform, zipf:S, hot_expert:P, hot_rank:P, ragged or zero_rank");
  }
  const auto routing = measure::ParseRouting(value);
  if (routing.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", routing.status().message()));
}

// A model that consists of one MoE layer.
lm::TransformerConfig ModelOf(const MoeLayerConfig& layer) {
  lm::TransformerConfig model;
  model.vocab_size = 0;
  model.num_layers = 1;
  model.hidden_size = layer.router.hidden_size;
  model.moe = layer;
  return model;
}

plan::ModelSize LayerSizeOf(const lm::TransformerConfig& model) {
  plan::ModelSize size = plan::SizeOf(model);
  const int64_t h = model.hidden_size;
  const int64_t around = h + 4 * h * h + 2 * h;  // last norm, attention, two norms
  return {.total = size.total - around, .active = size.active - around};
}

// Shares are a matrix of ranks by ranks. Above this many ranks the largest possible skew is used.
constexpr int kMostSharedRanks = 1024;

// Rows of the rank with the most, relative to their mean.
double RowSkew(const Settings& settings, int ep) {
  const auto routing = measure::ParseRouting(settings.text("routing"));
  if (settings.empty("routing") || !routing.ok()) return 1;
  if (ep > kMostSharedRanks) return ep;
  const std::vector<double> shares =
      measure::DestinationShares(*routing, ep, settings.integer("num-experts"));
  return ep * *std::max_element(shares.begin(), shares.end());
}

// Without peer memory a direct dispatcher runs staged, which the row would not show.
absl::Status CheckDispatch(const Settings& settings, const Launch& launch) {
  MOE_RETURN_IF_ERROR(CheckTwoHops(settings, launch.device));
  if (launch.plan.backend != Backend::kNccl || !settings.is("dispatch", "direct")) {
    return absl::OkStatus();
  }
  return WrongFlag("--dispatch", "direct",
                   "staged or hierarchical: backend nccl has no peer memory");
}

absl::Status CheckLayer(const Settings& settings, const MoeLayerConfig& layer, int ranks, int ep) {
  if (!settings.is("threads", "auto") && settings.integer("threads") < 1) {
    return WrongValue(settings, "threads", "at least 1");
  }
  const int node = layer.dispatcher.node_size;
  if (layer.dispatcher.algorithm == DispatchAlgorithm::kHierarchical && node > 0 &&
      ep % node != 0) {
    return WrongFlag("--node-size", absl::StrCat(node),
                     absl::StrCat("0 or a divisor of --ep ", ep));
  }
  if (ranks % ep != 0) {
    return WrongFlag("--ep", absl::StrCat(ep), absl::StrCat("a divisor of the ", ranks, " ranks"));
  }
  const auto hidden = static_cast<double>(layer.router.hidden_size);
  const double widest =
      3.0 * hidden *
      std::max({static_cast<double>(layer.ffn_hidden_size) * layer.router.num_experts,
                static_cast<double>(layer.shared_expert_ffn_hidden_size), 4 * hidden,
                static_cast<double>(settings.integer(kTokensPerRank))});
  if (widest > kMostElements) {
    return WrongFlag("the layer", absl::StrCat("about ", widest, " elements"), "at most 1e12");
  }
  return absl::OkStatus();
}

// Fills the row's description of the point, whether it can run or not.
void FillPoint(const Settings& settings, sweep::Point& point) {
  point.experts = settings.integer("num-experts");
  point.topk = settings.integer("moe-router-topk");
  point.capacity_factor = settings.is("moe-expert-capacity-factor", "none")
                              ? 0
                              : settings.real("moe-expert-capacity-factor");
  point.ep = settings.integer("expert-model-parallel-size");
  point.tp = settings.integer("tensor-model-parallel-size");
  point.etp = settings.integer("expert-tensor-parallel-size");
  point.pp = settings.integer("pipeline-model-parallel-size");
  point.ranks = settings.integer("ranks");
  point.overlap = settings.integer("moe-overlap-degree");
  point.hidden = settings.integer("hidden-size");
  point.ffn = settings.integer("moe-ffn-hidden-size");
  point.dtype = settings.text("dtype");
  point.router = settings.text("router");
  point.dispatch = settings.text("dispatch");
  point.seed = settings.seed("seed");
  if (point.measure == "train") return;
  point.tokens_per_rank = settings.integer(kTokensPerRank);
  point.routing = settings.text("routing");
}

// Fill `planned` with the run, checked and made as by `moe train` and `moe bench layer`.
// kInvalidArgument with flag, value and what was expected if values do not fit together.
absl::Status PlanTraining(const Settings& settings, const lm::Corpus& corpus,
                          PlannedPoint& planned) {
  const World& world = planned.launch.world;
  MOE_RETURN_IF_ERROR(CheckDispatch(settings, planned.launch));
  MOE_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(settings, world));
  planned.train = options.train;
  const lm::TrainConfig& train = planned.train;
  const int64_t batch =
      train.micro_batch_size * train.sequence_length * train.trainer.micro_batches;
  planned.point.tokens_per_rank = (batch + world.ranks / 2) / world.ranks;
  planned.point.flops_per_token =
      plan::TokenFlops(plan::CostOf(train.model), static_cast<double>(train.sequence_length));
  planned.point.tokens = batch * train.steps;
  planned.memory = plan::ShapeOfTraining(train, world.ranks);
  return lm::CheckTextLength(train, corpus);
}

absl::Status PlanLayer(const Settings& settings, PlannedPoint& planned) {
  MOE_RETURN_IF_ERROR(CheckDispatch(settings, planned.launch));
  TrainOptions options;
  Table rows = TrainSettings(options);
  AddLayerMeasure(planned.layer, planned.measure, rows);
  MOE_RETURN_IF_ERROR(Fill(settings, rows));
  MoeLayerConfig& layer = options.train.model.moe;
  MOE_RETURN_IF_ERROR(CompleteLayer(settings, layer));
  const int ranks = planned.launch.world.ranks;
  const MeshShape& mesh = options.train.trainer.session.mesh;
  MOE_RETURN_IF_ERROR(CheckLayer(settings, layer, ranks, mesh.expert));
  planned.layer = {
      .trainer = {.session = {.device = planned.launch.device.kind,
                              .mesh = mesh,
                              .threads = static_cast<int>(planned.point.threads),
                              .tensor_leaves = settings.integer("tensor-leaves"),
                              .bfloat16_order = options.train.trainer.session.bfloat16_order},
                  .dtype = options.train.trainer.dtype,
                  .seed = options.train.trainer.seed},
      .tokens = planned.layer.tokens,
      .layer = layer};
  MOE_RETURN_IF_ERROR(CheckMesh(planned.layer.trainer.session, ranks));
  layer.router.micro_batch_tokens = planned.layer.rows();
  MOE_RETURN_IF_ERROR(InFlags(ValidateRouterConfig(layer.router), settings));
  MOE_RETURN_IF_ERROR(CheckBFloat16Order(planned.layer.trainer));
  if (!settings.empty("routing")) {
    MOE_ASSIGN_OR_RETURN(planned.layer.routing, measure::ParseRouting(settings.text("routing")));
  }
  const lm::TransformerConfig model = ModelOf(layer);
  planned.layer_size = LayerSizeOf(model);
  planned.memory = {.model = model,
                    .trainer = planned.layer.trainer,
                    .parameters_total = planned.layer_size.total,
                    .tokens = planned.layer.rows(),
                    .row_skew = RowSkew(settings, mesh.expert),
                    .trained = false};
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> NameCoupled(const std::vector<std::string>& args) {
  const auto is_flag = [](const std::string& text) {
    return absl::StartsWith(text, "--") && text.size() > 2;
  };
  const auto name = [](absl::string_view flag) {
    return flag.substr(2, flag.find('=') - 2);
  };
  std::vector<std::string> named;
  for (size_t i = 0; i < args.size(); ++i) {
    named.push_back(args[i]);
    if (args[i] != "--with" || (i + 1 < args.size() && !is_flag(args[i + 1]))) continue;
    size_t before = i;
    do {
      if (before == 0) break;
      --before;
    } while (!is_flag(args[before]));
    if (i + 1 == args.size() || before == i || !is_flag(args[before])) {
      return WrongFlag("--with", "alone",
                       "it between two flags: --num-experts 8,64 --with --topk 1,2");
    }
    named.push_back(absl::StrCat(name(args[before]), ":", name(args[i + 1])));
  }
  return named;
}

absl::Status TakeTokensOfLayer(Settings& settings) {
  const Value& tokens = settings.value("tokens");
  const bool meant = settings.is("measure", "layer") && tokens.origin == Origin::kFlag &&
                     !settings.given(kTokensPerRank);
  if (!meant) return absl::OkStatus();
  Settings taken(SweepSettings());
  for (const Setting& row : settings.table()) {
    const Value& value = settings.value(row.name);
    if (value.origin == Origin::kDefault || row.name == "tokens") continue;
    MOE_RETURN_IF_ERROR(taken.Set(row, value.texts, value.origin, value.where));
  }
  MOE_RETURN_IF_ERROR(
      taken.Set(*taken.Find(kTokensPerRank), {tokens.texts.back()}, tokens.origin, tokens.where));
  settings = std::move(taken);
  return absl::OkStatus();
}

absl::StatusOr<SweepPlan> SweepPlan::Make(const Settings& settings,
                                          absl::Span<const std::string> environment) {
  const Measure measure = settings.is("measure", "train") ? Measure::kTrain : Measure::kLayer;
  MOE_RETURN_IF_ERROR(RefuseUnread(settings, measure));
  if (measure == Measure::kLayer) MOE_RETURN_IF_ERROR(RefuseGateWithRouting(settings));
  SweepPlan plan(Settings(PointSettings()), measure);
  plan.repetitions_ = settings.is("repetitions", "auto") ? (measure == Measure::kLayer ? 5 : 1)
                                                         : settings.integer("repetitions");
  if (plan.repetitions_ < 1 || plan.repetitions_ > 1000) {
    return WrongValue(settings, "repetitions", "1 to 1000");
  }
  MOE_RETURN_IF_ERROR(plan.ParseAxes(settings));
  for (const Setting& s : PointSettings().rows()) {
    if (s.is(kOfOneRun)) continue;
    const Value& value = settings.value(s.name);
    const bool axis = std::any_of(plan.axes_.begin(), plan.axes_.end(),
                                  [&](const sweep::Axis& a) { return a.name == s.name; });
    if (axis || value.origin == Origin::kDefault || IsOfOther(measure, s)) continue;
    MOE_RETURN_IF_ERROR(plan.base_.Set(s, value.texts, value.origin, value.where));
  }
  MOE_RETURN_IF_ERROR(plan.Couple(settings));
  MOE_RETURN_IF_ERROR(plan.FindLaunches(environment));
  return plan;
}

absl::Status SweepPlan::ParseAxes(const Settings& settings) {
  for (const SweepAxis& axis : SweepAxes()) {
    if (!settings.given(axis.name) || !ChangesResults(measure_, *base_.Find(axis.name))) continue;
    sweep::AxisForm form = axis.form;
    form.repeats = IsCoupled(settings, axis.name);
    auto values = sweep::ParseAxis(settings.text(axis.name), form);
    if (!values.ok()) return NamedAxis(axis.name, values.status());
    Settings scratch(PointSettings());
    for (const std::string& value : *values) {
      MOE_RETURN_IF_ERROR(scratch.Set(*scratch.Find(axis.name), {value}, Origin::kFlag,
                                      absl::StrCat("--", axis.name)));
      if (absl::string_view(axis.name) != "routing") continue;
      MOE_RETURN_IF_ERROR(CheckRouting(value));
    }
    axes_.push_back({.name = axis.name, .values = *std::move(values)});
  }
  return absl::OkStatus();
}

absl::Status SweepPlan::Couple(const Settings& settings) {
  for (const auto& [first, second] : CoupledFlags(settings)) {
    const auto place = [&](const std::string& name) {
      const auto at = std::find_if(axes_.begin(), axes_.end(),
                                   [&](const sweep::Axis& a) { return a.name == name; });
      return static_cast<int>(at - axes_.begin());
    };
    int a = place(first), b = place(second);
    const int none = static_cast<int>(axes_.size());
    if (a == none || b == none) {
      return WrongFlag("--with", absl::StrCat(first, ":", second),
                       "two flags that are given with lists");
    }
    if (axes_[a].values.size() != axes_[b].values.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--with: --", first, " has ", axes_[a].values.size(), " values and --",
                       second, " ", axes_[b].values.size(), ", expected as many"));
    }
    while (axes_[a].with >= 0) a = axes_[a].with;
    while (axes_[b].with >= 0) b = axes_[b].with;
    if (a != b) axes_[std::max(a, b)].with = std::min(a, b);
  }
  MOE_ASSIGN_OR_RETURN(values_, sweep::CrossProduct(axes_));
  std::set<std::vector<std::string>> seen;
  for (const std::vector<std::string>& point : values_) {
    if (seen.insert(point).second) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("--with: the point ", absl::StrJoin(point, ", "), " stands twice"));
  }
  return absl::OkStatus();
}

absl::Status SweepPlan::FindLaunches(absl::Span<const std::string> environment) {
  for (size_t i = 0; i < values_.size(); ++i) {
    const Settings point = SettingsOf(i);
    const bool given = point.given("ranks");
    const int ranks = point.integer("ranks");
    if (launches_.count(ranks) > 0 || (!given && !launches_.empty())) continue;
    MOE_ASSIGN_OR_RETURN(Launch launch, PlanLaunch(point, environment, ComputesOn::kAnyDevice));
    const int found = launch.world.ranks;
    launches_.emplace(given ? ranks : found, std::move(launch));
    if (!given) return base_.Set(*base_.Find("ranks"), {absl::StrCat(found)}, Origin::kFlag, "");
  }
  return absl::OkStatus();
}

Settings SweepPlan::SettingsOf(size_t index) const {
  Settings point = base_;
  for (size_t a = 0; a < axes_.size(); ++a) {
    const Setting& setting = *point.Find(axes_[a].name);
    // Its form was checked when the axis was parsed.
    (void)point.Set(setting, {values_[index][a]}, Origin::kFlag, absl::StrCat("--", setting.name));
  }
  return point;
}

PlannedPoint SweepPlan::At(size_t index, const lm::Corpus& text) const {
  Settings settings = SettingsOf(index);
  PlannedPoint planned;
  planned.launch = launches_.at(settings.integer("ranks"));
  const World& world = planned.launch.world;
  planned.refused = ApplyRouterPreset(settings);
  const Setting& ep = *settings.Find("expert-model-parallel-size");
  if (measure_ == Measure::kLayer && !settings.given(ep.name)) {
    const MeshShape mesh = {.expert_tensor = settings.integer("expert-tensor-parallel-size")};
    const int all = measure::AllShareExperts(mesh, world.ranks);
    (void)settings.Set(ep, {absl::StrCat(all)}, Origin::kFlag, "--ranks");
  }
  const int threads = ThreadsOf(settings, world);
  sweep::Point& point = planned.point;
  point.measure = measure_ == Measure::kLayer ? "layer" : "train";
  point.settings = SettingsText(settings, threads);
  point.backend = NameOf(planned.launch.plan.backend);
  if (measure_ == Measure::kTrain) point.text_xxh3 = HashText(text.xxh3);
  point.threads = threads;
  point.repetitions = repetitions_;
  FillPoint(settings, point);
  planned.label = LabelOf(settings);
  if (planned.refused.ok()) planned.refused = CheckDevices(planned.launch, settings);
  if (!planned.refused.ok()) return planned;
  planned.refused = measure_ == Measure::kTrain ? PlanTraining(settings, text, planned)
                                                : PlanLayer(settings, planned);
  return planned;
}

std::string SweepPlan::SettingsText(const Settings& point, int threads) const {
  std::string text = measure_ == Measure::kTrain ? "--measure train " : "";
  for (const Setting& s : point.table()) {
    // Texts and ids are identified by their hash, wherever they are stored.
    if (!ChangesResults(measure_, s) || s.is(kByContent)) continue;
    if (s.name == "threads") {
      absl::StrAppend(&text, "--threads ", threads, " ");
      continue;
    }
    const std::vector<std::string>& values = point.value(s.name).texts;
    const std::string fallback = s.kind == Kind::kSwitch ? "false" : s.fallback;
    for (const std::string& value : values) {
      const std::string canonical = Canonical(s, value);
      if (canonical == Canonical(s, fallback) && !s.is(kAlwaysTold)) continue;
      absl::StrAppend(&text, "--", s.name, s.kind == Kind::kSwitch ? "=" : " ",
                      ShellQuote(canonical), " ");
    }
  }
  return absl::StrCat(text, "--repetitions ", repetitions_);
}

std::string SweepPlan::LabelOf(const Settings& point) const {
  std::string label;
  for (const SweepAxis& axis : SweepAxes()) {
    const bool varies = std::any_of(axes_.begin(), axes_.end(), [&](const sweep::Axis& a) {
      return a.name == axis.name && a.values.size() > 1;
    });
    if (!varies && !InEveryLabel(axis.name)) continue;
    absl::StrAppend(&label, label.empty() ? "" : " ", axis.label, "=", point.text(axis.name));
  }
  return label;
}

}  // namespace moe::cli
