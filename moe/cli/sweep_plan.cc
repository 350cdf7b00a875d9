#include "moe/cli/sweep_plan.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/bench/routing_spec.h"
#include "moe/cli/layer_settings.h"
#include "moe/cli/sweep_point.h"
#include "moe/cli/train_options.h"

namespace moe::cli {
namespace {

// Main axes stand in every label.
bool InEveryLabel(absl::string_view name) {
  return name == "num-experts" || name == "moe-router-topk" || name == "moe-expert-capacity-factor";
}

// Settings of which a preset may change the value: their absence would not say what it is.
bool AlwaysTold(absl::string_view name) {
  return InEveryLabel(name) || name == "router" || name == "ranks" || name == "activation" ||
         name == "moe-projection-biases" || name == "moe-shared-expert-gate";
}

// "1e-3" and "0.001" are one value.
std::string Canonical(const Setting& setting, const std::string& text) {
  double number = 0;
  const bool numeric = setting.kind == Kind::kReal && absl::SimpleAtod(text, &number);
  return numeric ? bench::Cell(number).text() : text;
}

absl::Status NamedAxis(const char* name, const absl::Status& status) {
  return absl::InvalidArgumentError(absl::StrCat("--", name, ": ", status.message()));
}

// A flag that is given and not read would say something else than what is measured.
absl::Status RefuseUnread(const Settings& settings, Measure measure) {
  for (const Setting& s : PointSettings()) {
    if (!IsOfOther(measure, s) || settings.value(s.name).origin != Origin::kFlag) continue;
    const bool layer = measure == Measure::kLayer;
    return WrongFlag(absl::StrCat("--", s.name), settings.text(s.name),
                     absl::StrCat("none with --measure ", layer ? "layer" : "train",
                                  ": it is of --measure ", layer ? "train" : "layer"));
  }
  return absl::OkStatus();
}

// A given routing takes the gate's place; a row that names a gate or its options would be of none.
absl::Status RefuseGateWithRouting(const Settings& settings) {
  if (!settings.given("routing")) return absl::OkStatus();
  for (const char* name :
       {"router", "moe-router-score-function", "moe-router-pre-softmax", "moe-router-num-groups",
        "moe-router-group-topk", "moe-router-topk-scaling-factor", "moe-router-enable-expert-bias",
        "moe-router-bias-update-rate", "moe-input-jitter-eps", "moe-router-random-second",
        "num-zero-experts", "moe-pad-expert-input-to-capacity"}) {
    if (!settings.given(name)) continue;
    return WrongFlag(absl::StrCat("--", name), settings.text(name),
                     "none with --routing, which says what experts the tokens are given");
  }
  return absl::OkStatus();
}

absl::Status CheckRouting(const std::string& value) {
  if (absl::StartsWith(value, "matrix:") || absl::StartsWith(value, "trace:")) {
    return WrongFlag("--routing", absl::StrCat("'", value, "'"),
                     "uniform, zipf:S, hot_expert:P, hot_rank:P, ragged or zero_rank");
  }
  const auto routing = bench::ParseRouting(value);
  if (routing.ok()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", routing.status().message()));
}

}  // namespace

absl::StatusOr<SweepPlan> SweepPlan::Make(const Settings& settings,
                                          absl::Span<const std::string> environment) {
  const Measure measure = settings.is("measure", "train") ? Measure::kTrain : Measure::kLayer;
  MOE_RETURN_IF_ERROR(RefuseUnread(settings, measure));
  if (measure == Measure::kLayer) MOE_RETURN_IF_ERROR(RefuseGateWithRouting(settings));
  SweepPlan plan(Settings(PointSettings()), measure);
  plan.repetitions_ = settings.is("repetitions", "auto") ? (measure == Measure::kLayer ? 5 : 1)
                                                         : settings.integer("repetitions");
  if (plan.repetitions_ < 1 || plan.repetitions_ > 1000) {
    return WrongFlag("--repetitions", settings.text("repetitions"), "1 to 1000");
  }
  MOE_RETURN_IF_ERROR(plan.ParseAxes(settings));
  for (const Setting& s : PointSettings()) {
    if (IsOfOneRun(s)) continue;
    const Value& value = settings.value(s.name);
    const bool axis = std::any_of(plan.axes_.begin(), plan.axes_.end(),
                                  [&](const sweep::Axis& a) { return a.name == s.name; });
    if (axis || value.origin == Origin::kDefault || IsOfOther(measure, s)) continue;
    MOE_RETURN_IF_ERROR(plan.base_.Set(s, value.texts, value.origin, value.where));
  }
  MOE_ASSIGN_OR_RETURN(plan.values_, sweep::CrossProduct(plan.axes_));
  MOE_RETURN_IF_ERROR(plan.FindLaunches(environment));
  return plan;
}

absl::Status SweepPlan::ParseAxes(const Settings& settings) {
  for (const SweepAxis& axis : SweepAxes()) {
    if (!settings.given(axis.name) || !ChangesResults(measure_, *base_.Find(axis.name))) continue;
    auto values = sweep::ParseAxis(settings.text(axis.name), axis.form);
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
    // Its form was checked when the axis was read.
    (void)point.Set(setting, {values_[index][a]}, Origin::kFlag, absl::StrCat("--", setting.name));
  }
  return point;
}

PlannedPoint SweepPlan::At(size_t index, const SweepText& text) const {
  Settings settings = SettingsOf(index);
  PlannedPoint planned;
  planned.launch = launches_.at(settings.integer("ranks"));
  const World& world = planned.launch.world;
  planned.refused = ApplyRouterPreset(settings);
  const Setting& ep = *settings.Find("expert-model-parallel-size");
  if (measure_ == Measure::kLayer && !settings.given(ep.name)) {
    (void)settings.Set(ep, {absl::StrCat(world.ranks)}, Origin::kFlag, "--ranks");
  }
  const int threads = settings.is("threads", "auto")
                          ? std::max(1, world.cores / std::max(1, world.local_ranks))
                          : settings.integer("threads");
  sweep::Point& point = planned.point;
  point.measure = measure_ == Measure::kLayer ? "layer" : "train";
  point.settings = SettingsText(settings, threads);
  point.backend = NameOf(planned.launch.plan.backend);
  point.text_xxh3 = text.xxh3;
  point.threads = threads;
  point.repetitions = repetitions_;
  FillPoint(settings, point);
  planned.label = LabelOf(settings);
  if (planned.refused.ok()) planned.refused = CheckDevices(planned.launch, settings);
  if (!planned.refused.ok()) return planned;
  planned.refused = measure_ == Measure::kTrain ? PlanTraining(settings, text.corpus, planned)
                                                : PlanLayer(settings, planned);
  return planned;
}

std::string SweepPlan::SettingsText(const Settings& point, int threads) const {
  std::string text = measure_ == Measure::kTrain ? "--measure train " : "";
  for (const Setting& s : point.table()) {
    // The text is known by its hash, wherever it lies.
    if (!ChangesResults(measure_, s) || s.name == "data") continue;
    if (s.name == "threads") {
      absl::StrAppend(&text, "--threads ", threads, " ");
      continue;
    }
    const std::vector<std::string>& values = point.value(s.name).texts;
    const std::string fallback = s.kind == Kind::kSwitch ? "false" : s.fallback;
    for (const std::string& value : values) {
      const std::string canonical = Canonical(s, value);
      if (canonical == Canonical(s, fallback) && !AlwaysTold(s.name)) continue;
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
