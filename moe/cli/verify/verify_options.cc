#include "moe/cli/verify/verify_options.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <fmt/format.h>

#include "comm/nccl/nccl_world.h"
#include "gating/gate.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/io/file.h"
#include "moe/run/context.h"
#include "moe/train/trainer.h"

namespace moe::cli {
namespace {

using verify::Axis;

bool Has(const std::vector<std::string>& values, absl::string_view value) {
  return std::find(values.begin(), values.end(), value) != values.end();
}

absl::Status Wrong(absl::string_view axis, absl::string_view value, absl::string_view expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("--layouts: ", axis, " is '", value, "', expected ", expected));
}

// One word of --layouts: "dispatch=staged,direct".
absl::Status NameValues(absl::string_view word, std::vector<Axis>& axes) {
  const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
  const auto& [name, values] = parts;
  if (values.empty()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--layouts: '", word, "' has no values, expected axis=value,value such as ranks=1,2"));
  }
  std::vector<std::string> names;
  for (const Axis& axis : axes) names.emplace_back(axis.name);
  if (!Has(names, name)) {
    return absl::InvalidArgumentError(absl::StrCat("--layouts: unknown axis '", name,
                                                   "', expected ", absl::StrJoin(names, ", "),
                                                   DidYouMean(name, names, "", "")));
  }
  Axis& axis = Find(axes, name);
  if (axis.named) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layouts: ", name, " is given twice, expected once"));
  }
  axis.named = true;
  if (values == "all" && !axis.all.empty()) {
    axis.values = axis.all;
    return absl::OkStatus();
  }
  axis.values = absl::StrSplit(values, ',');
  for (const std::string& value : axis.values) {
    verify::Layout layout;
    const absl::Status status = axis.apply(value, layout);
    if (status.ok()) continue;
    return Wrong(name, value,
                 absl::StrCat(status.message(), DidYouMean(value, axis.words, "", "")));
  }
  return absl::OkStatus();
}

// The axes of models that were named, "tp, pp"; empty: none was.
std::string ModelAxes(const std::vector<Axis>& axes) {
  std::vector<std::string> named;
  for (const Axis& axis : axes) {
    if (axis.of_model && axis.named) named.emplace_back(axis.name);
  }
  return absl::StrJoin(named, ", ");
}

// "ranks=1,2,4 ep=all transport=local,mpi dispatch=staged,direct overlap=1,4 capacity=none,1.0":
// any of the axes, in any order, separated by spaces; the others keep their defaults.
// kInvalidArgument names what is wrong and the nearest valid choice.
absl::StatusOr<std::vector<Axis>> ParseLayouts(absl::string_view text) {
  std::vector<Axis> axes = verify::Axes();
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipWhitespace())) {
    MOE_RETURN_IF_ERROR(NameValues(word, axes));
  }
  return axes;
}

// kInvalidArgument unless some of the values make a layout.
absl::Status CheckLayouts(std::vector<Axis>& axes) {
  if (!verify::AllLayouts(axes).empty()) return absl::OkStatus();
  if (const std::string named = ModelAxes(axes); !named.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layouts: no values of ranks, ep, ", named,
                     " fit together, expected ep to divide ranks / pp, tp to divide ep, and pp "
                     "above 1 beside vp and schedules other than 1f1b"));
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "--layouts: no ep of ", absl::StrJoin(Find(axes, "ep").values, ","), " divides any of ranks ",
      absl::StrJoin(Find(axes, "ranks").values, ","), ", expected ep=all or a divisor"));
}

struct Preset {
  const char* name;
  const char* value;
};

// A gate of the default run, with the options that make it different from the others.
struct Sample {
  const char* router;
  std::vector<Preset> presets;
};

// Of a model the shared expert is wide enough for four tensor-parallel ranks.
std::vector<Sample> Samples(bool groups_of_two, bool of_model) {
  Sample deepseek = {"deepseek-v3",
                     {{"moe-router-topk", "3"},
                      {"moe-router-topk-scaling-factor", "2.5"},
                      {"moe-shared-expert-intermediate-size", of_model ? "64" : "12"},
                      {"moe-router-load-balancing-type", "seq_aux_loss"}}};
  if (groups_of_two) {
    deepseek.presets.push_back({"moe-router-num-groups", "3"});
    deepseek.presets.push_back({"moe-router-group-topk", "2"});
  }
  return {{"mixtral", {}},
          deepseek,
          {"gshard", {{"moe-router-random-second", "true"}, {"moe-token-drop-policy", "position"}}},
          {"switch", {{"moe-input-jitter-eps", "0.1"}, {"activation", "relu2"}}},
          {"gpt-oss", {{"moe-router-load-balancing-type", "global_aux_loss"}}},
          {"llama4", {{"moe-shared-expert-intermediate-size", "12"}}},
          {"qwen2",
           {{"moe-shared-expert-intermediate-size", "12"}, {"moe-shared-expert-gate", "true"}}},
          {"longcat", {{"num-zero-experts", "2"}, {"activation", "geglu"}}},
          {"expert-choice", {}},
          {"noisy-topk", {}},
          {"sinkhorn", {}},
          {"sparsemixer", {{"moe-router-jitter-eps", "0.2"}}}};
}

absl::StatusOr<Settings> WithSample(const Settings& settings, const Sample& sample) {
  Settings result = settings;
  const std::string where = absl::StrCat("sample ", sample.router);
  MOE_RETURN_IF_ERROR(result.Set(*result.Find("router"), {sample.router}, Origin::kPreset, where));
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(result));
  for (const Preset& preset : sample.presets) {
    MOE_RETURN_IF_ERROR(
        result.Set(*result.Find(preset.name), {preset.value}, Origin::kPreset, where));
  }
  return result;
}

// Whether the fault shows in a model; and a gate in whose results it shows.
verify::FaultInfo InfoOf(verify::Fault fault) {
  for (const verify::FaultInfo& info : verify::Faults()) {
    if (info.fault == fault) return info;
  }
  return {verify::Fault::kNone, "", ""};
}

// The gates to run: the one that was asked for, one in which the fault shows, for a model one with
// an expert bias and a shared expert, or the samples.
absl::StatusOr<std::vector<Settings>> GatesOf(const Settings& settings,
                                              const VerifyOptions& options) {
  if (settings.value("router").origin != Origin::kDefault) return std::vector<Settings>{settings};
  const absl::string_view only = options.of_model ? "deepseek-v3" : InfoOf(options.fault).router;
  std::vector<Settings> gates;
  for (const Sample& sample : Samples(settings.integer("num-experts") % 3 == 0, options.of_model)) {
    if (!only.empty() && sample.router != only) continue;
    MOE_ASSIGN_OR_RETURN(Settings with, WithSample(settings, sample));
    gates.push_back(std::move(with));
  }
  return gates;
}

absl::StatusOr<verify::Fault> FaultOf(const Settings& settings) {
  if (settings.empty("inject")) return verify::Fault::kNone;
  const std::string& name = settings.text("inject");
  for (const verify::FaultInfo& info : verify::Faults()) {
    if (name == info.name) return info.fault;
  }
  return absl::InvalidArgumentError(absl::StrCat("--inject is '", name,
                                                 "', expected a name of --inject help",
                                                 DidYouMean(name, FaultNames(), "", "")));
}

absl::StatusOr<verify::ProblemSpec> SpecOf(const Settings& settings, const VerifyOptions& options) {
  VerifyOptions of_all_gates;
  verify::ProblemSpec spec;
  MOE_RETURN_IF_ERROR(Fill(settings, VerifySettings(of_all_gates, spec)));
  MOE_RETURN_IF_ERROR(CompleteLayer(settings, spec.layer));
  RouterConfig& router = spec.layer.router;
  router.seed = spec.seed;
  if (options.of_model) {
    spec.model = of_all_gates.model;
    spec.model->trainer.session.tensor_leaves = settings.integer("tensor-leaves");
    spec.micro_batch_tokens.assign(settings.integer("micro-batches"),
                                   spec.model->micro_batch_size * spec.model->sequence_length);
    return spec;
  }
  const int count = settings.integer("micro-batches");
  const int most = settings.integer("micro-batch-tokens");
  if (router.pad_to_capacity || router.token_group.tokens > 0) {
    spec.micro_batch_tokens.assign(count, most);
    router.micro_batch_tokens = most;
  } else {
    spec.micro_batch_tokens = verify::UnevenMicroBatches(count, most, router.gate);
  }
  MOE_RETURN_IF_ERROR(InFlags(ValidateRouterConfig(router), settings));
  return spec;
}

// The float64 loop carries bounds, some 1e8 multiply-adds a second, and 100 bytes a parameter.
absl::Status CheckSize(const std::vector<verify::ProblemSpec>& problems) {
  constexpr double kMostWork = 3e9, kMostParameters = 2e7;
  double work = 0, parameters = 0;
  for (const verify::ProblemSpec& spec : problems) {
    const RouterConfig& router = spec.layer.router;
    const auto ffn = static_cast<double>(spec.layer.ffn_hidden_size);
    const auto shared = static_cast<double>(spec.layer.shared_expert_ffn_hidden_size);
    const auto hidden = static_cast<double>(router.hidden_size);
    double tokens = 0;
    for (const int64_t t : spec.micro_batch_tokens) tokens += static_cast<double>(t);
    work += 2 * 9 * tokens * hidden * (router.top_k * ffn + shared);  // two steps, three passes
    parameters = std::max(parameters, 3 * hidden * (router.num_experts * ffn + shared));
  }
  if (work <= kMostWork && parameters <= kMostParameters) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format(
      "the shapes need {:.1e} multiply-adds of float64 and {:.1e} parameters, expected at most "
      "{:.0e} and {:.0e}: name one --router, or lower --hidden-size or --moe-ffn-hidden-size",
      work, parameters, kMostWork, kMostParameters));
}

absl::StatusOr<std::vector<Numerics>> NumericsOf(const Settings& settings, bool of_model) {
  if (settings.is("numerics", "both")) {
    if (of_model) return std::vector<Numerics>{Numerics::kLayoutInvariant};
    return std::vector<Numerics>{Numerics::kFast, Numerics::kLayoutInvariant};
  }
  const Numerics numerics = settings.choice("numerics", kNumericsWords);
  if (of_model && numerics == Numerics::kFast) {
    return WrongValue(settings, "numerics",
                      "layout-invariant for a model, whose steps have no bound in fast");
  }
  return std::vector<Numerics>{numerics};
}

// Whether the layouts are those of models. A fault that shows in models alone gives all values to
// axes that were not named.
absl::StatusOr<bool> OfModel(const Settings& settings, verify::Fault fault,
                             std::vector<Axis>& axes) {
  const std::string named = ModelAxes(axes);
  const bool shows_in_model = InfoOf(fault).of_model;
  if (fault != verify::Fault::kNone && !shows_in_model && !named.empty()) {
    return WrongValue(settings, "inject",
                      absl::StrCat("tree-order or lost-micro-batch beside ", named,
                                   " of --layouts: the others show in one layer"));
  }
  if (!named.empty() || !shows_in_model) return !named.empty();
  for (Axis& axis : axes) {
    if (axis.of_model && !axis.all.empty()) axis.values = axis.all;
  }
  return true;
}

// Sets the axis from --capacity-factor, which is another name of it.
absl::Status SetCapacityAxis(const Settings& settings, Axis& capacity) {
  if (!settings.given("moe-expert-capacity-factor")) return absl::OkStatus();
  if (capacity.named) {
    return WrongValue(settings, "moe-expert-capacity-factor",
                      "no such flag beside capacity=... of --layouts");
  }
  capacity.values = {settings.text("moe-expert-capacity-factor")};
  return absl::OkStatus();
}

// Sets the axis from --backend, which is another name of it. Processes of a launcher have one
// transport.
absl::Status SetTransportAxis(const Settings& settings, const Launch& launch, Axis& transport) {
  const std::string of_launch = moe::NameOf(launch.plan.backend);
  if (!settings.is("backend", "auto") && transport.named) {
    return WrongValue(settings, "backend", "no such flag beside transport=... of --layouts");
  }
  if (!transport.named) transport.values = {of_launch};
  for (const std::string& name : transport.values) {
    if (launch.plan.processes() && name != of_launch) {
      return Wrong("transport", name, absl::StrCat(of_launch, ", that of the launch"));
    }
    if (!launch.plan.processes() && name == "mpi") {
      return Wrong("transport", name, "local or nccl, unless mpirun -n R starts moe verify");
    }
  }
  if (!Has(transport.values, "nccl")) return absl::OkStatus();
  if (launch.device.kind != DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        "--device is cpu, expected cuda beside transport nccl, whose ranks compute on GPUs");
  }
  return Prefixed("transport nccl", NcclVersion().status());
}

// Limits the axis to the ranks of the processes: these run layouts of as many ranks and of fewer.
absl::Status SetRanksAxis(const Launch& launch, Axis& ranks) {
  if (!launch.plan.processes()) return absl::OkStatus();
  const int most = launch.world.ranks;
  const auto is_more = [&](const std::string& value) {
    verify::Layout layout;
    ranks.apply(value, layout).IgnoreError();
    return layout.ranks > most;
  };
  if (!ranks.named) {
    std::erase_if(ranks.values, is_more);
    if (!Has(ranks.values, absl::StrCat(most))) ranks.values.push_back(absl::StrCat(most));
  }
  const auto more = std::find_if(ranks.values.begin(), ranks.values.end(), is_more);
  if (more == ranks.values.end()) return absl::OkStatus();
  return Wrong("ranks", *more, absl::StrCat("at most the ", most, " that the launcher started"));
}

// The values of --layouts, of the flags that name an axis, and of the launch.
absl::StatusOr<std::vector<Axis>> AxesOf(const Settings& settings, const Launch& launch) {
  MOE_ASSIGN_OR_RETURN(std::vector<Axis> axes, ParseLayouts(settings.text("layouts")));
  MOE_RETURN_IF_ERROR(SetTransportAxis(settings, launch, Find(axes, "transport")));
  MOE_RETURN_IF_ERROR(SetRanksAxis(launch, Find(axes, "ranks")));
  Axis& dispatch = Find(axes, "dispatch");
  if (launch.device.kind == DeviceKind::kCuda && !dispatch.named) {
    dispatch.values = {"staged", "direct"};
  }
  for (const std::string& value : Find(axes, "offload").values) {
    if (launch.device.kind == DeviceKind::kCuda && value != "none") {
      return Wrong("offload", value, "none: state is not offloaded from GPUs yet");
    }
  }
  MOE_RETURN_IF_ERROR(SetCapacityAxis(settings, Find(axes, "capacity")));
  MOE_RETURN_IF_ERROR(CheckLayouts(axes));
  return axes;
}

// One gate: a problem per capacity, and the layouts of each.
absl::Status AddGate(const Settings& settings, const Axis& capacity,
                     const std::vector<verify::Layout>& layouts, VerifyOptions& options) {
  MOE_ASSIGN_OR_RETURN(verify::ProblemSpec spec, SpecOf(settings, options));
  const size_t first = options.problems.size();
  for (const std::string& value : capacity.values) {
    verify::Layout layout;
    capacity.apply(value, layout).IgnoreError();
    spec.layer.router.capacity_factor = layout.capacity;
    MOE_RETURN_IF_ERROR(verify::CheckFault(spec.layer, options.fault));
    options.problems.push_back(spec);
  }
  MOE_ASSIGN_OR_RETURN(const auto all_numerics, NumericsOf(settings, options.of_model));
  for (const Numerics numerics : all_numerics) {
    for (const verify::Layout& layout : layouts) {
      size_t problem = first;
      while (options.problems[problem].layer.router.capacity_factor != layout.capacity) ++problem;
      options.cases.push_back({problem, numerics, layout});
      if (!options.of_model) continue;
      const lm::TrainConfig config =
          TrainConfigOf(options.problems[problem], {.layout = layout, .device = options.device});
      MOE_RETURN_IF_ERROR(InFlags(lm::ValidateTrainConfig(config, layout.ranks), settings));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Settings> LoadVerifySettings(absl::Span<const std::string> args,
                                            absl::Span<const std::string> environment,
                                            std::vector<std::string>& warnings) {
  VerifyOptions options;
  verify::ProblemSpec spec;
  Settings settings(VerifySettings(options, spec));
  MOE_RETURN_IF_ERROR(LoadSettings(args, environment, settings, warnings));
  if (settings.on("help")) return settings;
  MOE_RETURN_IF_ERROR(ApplyRouterPreset(settings));
  return settings;
}

std::vector<std::string> FaultNames() {
  std::vector<std::string> names;
  for (const verify::FaultInfo& info : verify::Faults()) names.emplace_back(info.name);
  return names;
}

absl::StatusOr<Launch> PlanVerifyLaunch(const Settings& settings,
                                        absl::Span<const std::string> environment) {
  Table world;
  world.Add("--ranks R", {Kind::kInteger, "1"}, "");
  world.Add("--backend NAME", {Kind::kText, settings.text("backend")}, "");
  world.Add("--device NAME", {Kind::kText, settings.text("device")}, "");
  return PlanLaunch(Settings(world), environment, ComputesOn::kAnyDevice);
}

absl::StatusOr<VerifyOptions> MakeVerifyOptions(const Settings& settings, const Launch& launch) {
  VerifyOptions options = {.output = settings.text("output"),
                           .output_stderr = settings.text("output-stderr")};
  verify::ProblemSpec of_no_gate;
  MOE_RETURN_IF_ERROR(Fill(settings, VerifySettings(options, of_no_gate)));
  MOE_ASSIGN_OR_RETURN(options.fault, FaultOf(settings));
  options.device = launch.device.kind;
  MOE_ASSIGN_OR_RETURN(std::vector<Axis> axes, AxesOf(settings, launch));
  MOE_ASSIGN_OR_RETURN(options.of_model, OfModel(settings, options.fault, axes));
  const std::vector<verify::Layout> layouts =
      settings.on("full") ? verify::AllLayouts(axes) : verify::PairwiseLayouts(axes);
  MOE_ASSIGN_OR_RETURN(const std::vector<Settings> gates, GatesOf(settings, options));
  for (const Settings& gate : gates) {
    MOE_RETURN_IF_ERROR(AddGate(gate, Find(axes, "capacity"), layouts, options));
  }
  for (const verify::ProblemSpec& spec : options.problems) {
    MOE_RETURN_IF_ERROR(CheckBFloat16Order(
        {.session = {.device = options.device, .bfloat16_order = options.bfloat16_order},
         .dtype = spec.dtype}));
  }
  if (!options.of_model) MOE_RETURN_IF_ERROR(CheckSize(options.problems));
  return options;
}

}  // namespace moe::cli
