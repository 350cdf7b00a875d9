#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <map>
#include <string>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/measure/tables.h"
#include "moe/cli/report/format.h"
#include "moe/cli/report/rows.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"

namespace moe::report {
namespace {

using Json = nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Reads keys of an object; keeps the first error.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  // A number from `low` to `high`. kNone if absent or null.
  double Number(const char* key, double low = 0, double high = kInfinity) {
    const Json* const value = Find(key);
    if (value == nullptr) return kNone;
    if (!value->is_number()) return Refuse(key, *value, "a number");
    const auto number = value->get<double>();
    if (number >= low && number <= high) return number;
    return Refuse(key, *value,
                  std::isinf(high) ? absl::StrCat("at least ", low)
                                   : absl::StrCat("from ", low, " to ", high));
  }

  std::string Text(const char* key) {
    const Json* const value = Find(key);
    if (value == nullptr) return "";
    if (value->is_string()) return value->get<std::string>();
    Refuse(key, *value, "a string");
    return "";
  }

  // A number with all its digits, since Number would round a seed. Empty if absent.
  std::string NumberAsText(const char* key) {
    return std::isnan(Number(key)) ? "" : Find(key)->dump();
  }

  // A number, or the word "none" for infinity.
  double CapacityFactor(const char* key) {
    const Json* const value = Find(key);
    if (value == nullptr || *value == "none") return kInfinity;
    return Number(key);
  }

  const Json* Find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() || at->is_null() ? nullptr : &*at;
  }

  double Refuse(const char* key, const Json& value, const std::string& expected) {
    if (status.ok()) {
      status = absl::DataLossError(absl::StrCat(
          key, " is ", Shown(value.dump(-1, ' ', true, Json::error_handler_t::replace), 40),
          ", expected ", expected));
    }
    return kNone;
  }

  absl::Status status;

 private:
  const Json& object_;
};

absl::StatusOr<RunKind> KindOf(const Json& object) {
  if (!object.is_object()) {
    return absl::DataLossError(absl::StrCat("a row is a JSON ", object.type_name(),
                                            ", expected an object with the keys of its command"));
  }
  const auto has = [&](const char* key) {
    return object.contains(key);
  };
  if (has("op") && (has("time_us") || has("size_bytes"))) return RunKind::kBench;
  if (has("experts") && has("topk")) return RunKind::kSweep;
  if (has("pp") && has("limit_bytes")) return RunKind::kPlan;
  if ((has("step") && has("loss")) || (has("steps") && has("weights_xxh3"))) return RunKind::kTrain;
  return absl::DataLossError(
      "a row of no known command, expected op and time_us (moe bench), experts and topk (moe "
      "sweep), step and loss (moe train), or pp and limit_bytes (moe plan)");
}

// Columns that rows of layers may differ in.
std::string ShapeOf(Fields& f) {
  std::string shape;
  const auto add = [&](const char* letter, const char* key) {
    const double value = f.Number(key);
    if (!std::isfinite(value)) return;
    absl::StrAppend(&shape, shape.empty() ? "" : " ", letter, " ", ExactText(value));
  };
  add("E", "experts");
  add("H", "hidden");
  add("F", "ffn");
  add("K", "topk");
  if (f.Text("device") == "cuda") absl::StrAppend(&shape, " CUDA");
  add("T", "tokens");
  add("ep", "expert_parallel_size");
  if (f.Number("tensor_parallel_size") > 1) add("tp", "tensor_parallel_size");
  if (f.Number("expert_tensor_parallel_size") > 1) add("etp", "expert_tensor_parallel_size");
  add("cf", "capacity_factor");
  add("overlap", "overlap_degree");
  const std::string router = f.Text("router");
  if (!router.empty()) absl::StrAppend(&shape, " ", router);
  return shape;
}

template <typename Row>
Row ReadRow(Fields& f) {
  Row row;
  for (const Column<Row>& c : ColumnsOf<Row>()) {
    if (c.key[0] == 0) continue;
    if (const auto* number = std::get_if<double Row::*>(&c.value)) {
      row.*(*number) = f.Number(c.key, c.low, c.high);
    } else if (const auto* text = std::get_if<std::string Row::*>(&c.value)) {
      row.*(*text) = f.Text(c.key);
    } else {
      row.others.push_back(f.Number(c.key, c.low, c.high));
    }
  }
  return row;
}

absl::Status AddBench(Fields& f, Run& run) {
  auto row = ReadRow<BenchRow>(f);
  if (row.algorithm.empty()) row.algorithm = f.Text("dispatch");  // for a layer
  row.seed = f.NumberAsText("seed");
  row.shape = ShapeOf(f);
  run.bench.push_back(std::move(row));
  return f.status;
}

absl::Status AddSweep(Fields& f, Run& run) {
  auto row = ReadRow<SweepRow>(f);
  row.capacity_factor = f.CapacityFactor("cf");
  run.sweep.push_back(std::move(row));
  return f.status;
}

absl::Status AddPlan(Fields& f, Run& run) {
  run.plan.push_back(ReadRow<PlanRow>(f));
  return f.status;
}

// Reads expert_load: [layer][expert], the same shape at every step.
absl::Status ReadLoad(Fields& f, Run& run, TrainStep& row) {
  const Json* const load = f.Find("expert_load");
  const auto refuse = [](const std::string& reason) {
    return absl::DataLossError(absl::StrCat("expert_load ", reason));
  };
  if (load == nullptr) {
    if (run.num_layers == 0) return absl::OkStatus();
    return refuse("is not there, expected that of each step");
  }
  if (!load->is_array()) return refuse("is no list, expected [layer][expert]");
  const bool first = run.steps.empty();
  if (first) run.num_layers = static_cast<int>(load->size());
  for (const Json& layer : *load) {
    if (!layer.is_array()) return refuse("has a layer that is no list, expected [layer][expert]");
    if (first && &layer == &load->front()) run.num_experts = static_cast<int>(layer.size());
    if (static_cast<int>(layer.size()) != run.num_experts) {
      return refuse(absl::StrCat("has ", layer.size(), " experts in a layer, expected the ",
                                 run.num_experts, " of the first"));
    }
    for (const Json& slots : layer) {
      if (!slots.is_number() || slots.get<double>() < 0)
        return refuse("holds something else than counts");
      row.expert_load.push_back(slots.get<float>());
    }
  }
  if (static_cast<int>(load->size()) == run.num_layers) return absl::OkStatus();
  return refuse(absl::StrCat("has ", load->size(), " layers, expected the ", run.num_layers,
                             " of the first step"));
}

absl::Status AddStep(Fields& f, Run& run) {
  TrainStep row = {.step = f.Number("step"),
                   .loss = f.Number("loss", kAnyReal),
                   .validation_loss = f.Number("val_loss", kAnyReal),
                   .tokens_per_s = f.Number("tokens_per_s"),
                   .step_ms = f.Number("step_ms"),
                   .a2a_ms = f.Number("a2a_ms"),
                   .expert_ms = f.Number("expert_ms"),
                   .all_reduce_ms = f.Number("all_reduce_ms"),
                   .attention_ms = f.Number("attention_ms"),
                   .output_ms = f.Number("output_ms"),
                   .optimizer_ms = f.Number("optimizer_ms"),
                   .drop_fraction = f.Number("drop_fraction", 0, 1),
                   .max_violation = f.Number("max_vio"),
                   .dead_experts = f.Number("dead_experts"),
                   .peak_bytes = f.Number("peak_bytes"),
                   .learning_rate = f.Number("lr"),
                   .gradient_norm = f.Number("grad_norm"),
                   .expert_load = {}};
  MOE_RETURN_IF_ERROR(f.status);
  if (std::isnan(row.step)) return absl::DataLossError("step is null, expected a number");
  if (run.totals.has_value()) return absl::DataLossError("a step stands after the run's end");
  if (!run.steps.empty() && row.step <= run.steps.back().step) {
    return absl::DataLossError(absl::StrCat("step ", row.step, " stands after step ",
                                            run.steps.back().step, ", expected steps in order"));
  }
  MOE_RETURN_IF_ERROR(ReadLoad(f, run, row));
  run.steps.push_back(std::move(row));
  return absl::OkStatus();
}

absl::Status AddTotals(Fields& f, Run& run) {
  if (run.totals.has_value()) return absl::DataLossError("the run ends twice");
  run.totals = {.steps = f.Number("steps"),
                .tokens = f.Number("tokens"),
                .seconds = f.Number("seconds"),
                .validation_loss_before = f.Number("val_loss_before", kAnyReal),
                .validation_loss = f.Number("val_loss", kAnyReal),
                .weights_hash = f.Text("weights_xxh3")};
  return f.status;
}

absl::Status AddOrigin(const Json& object, Run& run) {
  Fields f(object);
  for (const char* key : measure::kOriginKeys) {
    const std::string text = f.Text(key);
    if (text.empty()) continue;
    const auto at = std::find_if(run.origin.begin(), run.origin.end(),
                                 [&](const Origin& o) { return absl::string_view(o.key) == key; });
    if (at == run.origin.end()) {
      run.origin.push_back({key, text, text});
    } else {
      at->first = std::min(at->first, text);
      at->last = std::max(at->last, text);
    }
  }
  return f.status;
}

absl::Status AddRow(const Json& object, Run& run) {
  const absl::StatusOr<RunKind> known = KindOf(object);
  const bool told = object.is_object() && object.contains("provenance");
  if (told && !object["provenance"].is_object()) {
    return absl::DataLossError("provenance is no object");
  }
  if (known.ok() || told) {
    MOE_RETURN_IF_ERROR(AddOrigin(told ? object["provenance"] : object, run));
  }
  if (told) {
    Fields start(object);
    run.line = start.Text("line");
    MOE_RETURN_IF_ERROR(start.status);
  }
  // the first line of a training run
  if (!known.ok()) return told ? absl::OkStatus() : known.status();
  const RunKind kind = *known;
  const bool first = run.bench.empty() && run.sweep.empty() && run.plan.empty() &&
                     run.steps.empty() && !run.totals.has_value();
  if (!first && kind != run.kind) {
    return absl::DataLossError(absl::StrCat("a row of moe ", NameOf(kind),
                                            " stands among rows of moe ", NameOf(run.kind)));
  }
  run.kind = kind;
  Fields fields(object);
  if (kind == RunKind::kBench) return AddBench(fields, run);
  if (kind == RunKind::kSweep) return AddSweep(fields, run);
  if (kind == RunKind::kPlan) return AddPlan(fields, run);
  return object.contains("step") ? AddStep(fields, run) : AddTotals(fields, run);
}

constexpr int64_t kMaxBytes = int64_t{256} << 20;
constexpr JsonLimits kLimits = {.max_bytes = kMaxBytes, .max_values = int64_t{1} << 23};

}  // namespace

absl::StatusOr<Run> ParseRun(absl::string_view file, absl::string_view document) {
  if (static_cast<int64_t>(document.size()) > kMaxBytes) {
    return absl::DataLossError(
        absl::StrCat(file, ": ", document.size(), " bytes, expected at most ", kMaxBytes));
  }
  Run run;
  run.path = std::string(file);
  run.name = run.path;
  if (absl::StripAsciiWhitespace(document).empty()) {
    return absl::DataLossError(absl::StrCat(file, ": holds no rows (line 1)"));
  }
  const auto add = [&](const Json& row) {
    return AddRow(row, run);
  };
  MOE_RETURN_IF_ERROR(ReadJsonRows(file, document, kLimits, add));
  if (run.bench.empty() && run.sweep.empty() && run.plan.empty() && run.steps.empty()) {
    return absl::DataLossError(absl::StrCat(
        file, run.totals.has_value() ? ": holds no steps (line 1)" : ": holds no rows (line 1)"));
  }
  return run;
}

absl::StatusOr<Run> ReadRun(const std::string& path) {
  std::error_code ignored;
  const bool folder = std::filesystem::is_directory(path, ignored);
  const std::string file = folder ? (std::filesystem::path(path) / "metrics.jsonl").string() : path;
  MOE_ASSIGN_OR_RETURN(const MappedFile mapped, MappedFile::Open(file));
  MOE_ASSIGN_OR_RETURN(Run run, ParseRun(file, mapped.text()));
  run.path = path;
  return run;
}

std::vector<std::string> ShortNames(absl::Span<const std::string> paths) {
  std::vector<std::vector<std::string>> parts;  // components of each path, without generic names
  size_t longest = 1;
  for (const std::string& path : paths) {
    std::vector<std::string> p = absl::StrSplit(path, '/', absl::SkipEmpty());
    if (p.size() > 1 && p.back() == "metrics.jsonl") p.pop_back();
    if (p.empty()) p.push_back(path);
    for (const char* suffix : {".jsonl", ".json"}) {
      if (p.back().size() > absl::string_view(suffix).size()) {
        p.back() = std::string(absl::StripSuffix(p.back(), suffix));
      }
    }
    longest = std::max(longest, p.size());
    parts.push_back(std::move(p));
  }
  std::vector<std::string> names;
  for (size_t length = 1; length <= longest; ++length) {
    names.clear();
    std::map<std::string, int> uses;
    for (const auto& p : parts) {
      names.push_back(
          absl::StrJoin(p.end() - static_cast<int64_t>(std::min(length, p.size())), p.end(), "/"));
      ++uses[names.back()];
    }
    if (uses.size() == names.size()) return names;
  }
  std::map<std::string, int> seen;
  for (std::string& name : names) {
    if (const int count = ++seen[name]; count > 1) absl::StrAppend(&name, " (", count, ")");
  }
  return names;
}

}  // namespace moe::report
