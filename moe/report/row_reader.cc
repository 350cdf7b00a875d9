#include "moe/report/row_reader.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include <absl/strings/str_cat.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/io/bounded_json.h"
#include "moe/report/format.h"

namespace moe::report {
namespace {

using Json = nlohmann::json;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// Takes keys from an object; remembers the first that is wrong.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  // A number from `low` to `high`. Absent or null: kNone.
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
  double Real(const char* key) { return Number(key, -kInfinity); }
  double Percent(const char* key) { return Number(key, 0, 100); }

  std::string Text(const char* key) {
    const Json* const value = Find(key);
    if (value == nullptr) return "";
    if (value->is_string()) return value->get<std::string>();
    Refuse(key, *value, "a string");
    return "";
  }

  // A number with all its digits; those of a seed are more than Number keeps. Absent: empty.
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
  if ((has("step") && has("loss")) || (has("steps") && has("weights_xxh3"))) return RunKind::kTrain;
  return absl::DataLossError(
      "a row of no known command, expected op and time_us (moe bench), experts and topk (moe "
      "sweep), or step and loss (moe train)");
}

// What rows of kernels and layers differ in. Of a kernel the tokens follow from its size and K.
std::string ShapeOf(Fields& f, bool of_kernel) {
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
  if (of_kernel) return shape;
  add("T", "tokens");
  add("ep", "expert_parallel_size");
  add("cf", "capacity_factor");
  add("overlap", "overlap_degree");
  const std::string router = f.Text("router");
  if (!router.empty()) absl::StrAppend(&shape, " ", router);
  return shape;
}

absl::Status AddBench(Fields& f, Run& run) {
  BenchRow row;
  row.op = f.Text("op");
  row.algorithm = f.Text("algorithm");
  if (row.algorithm.empty()) row.algorithm = f.Text("product");
  row.of_kernel = f.Find("product") != nullptr || f.Find("kernel") != nullptr;
  // There are many gates, and parts of one only on a GPU.
  if (row.algorithm.empty() && f.Text("kernel") == "gate") row.algorithm = f.Text("router");
  if (row.algorithm.empty()) row.algorithm = f.Text("kernel");
  row.backend = f.Text("backend");
  row.transport = f.Text("transport");
  row.routing = f.Text("routing");
  row.dtype = f.Text("dtype");
  row.status = f.Text("status");
  row.error = f.Text("error");
  row.seed = f.NumberAsText("seed");
  row.settings = f.Text("settings");
  row.ranks = f.Number("ranks");
  row.hosts = f.Number("hosts");
  row.size_bytes = f.Number("size_bytes");
  row.time_us = f.Number("time_us");
  row.time_us_p99 = f.Number("time_us_p99");
  row.cv_pct = f.Number("time_us_cv_pct");
  row.algbw = f.Number("algbw_gbytes_per_s");
  row.busbw = f.Number("busbw_gbytes_per_s");
  row.memcpy = f.Number("memcpy_gbytes_per_s");
  row.sent_imbalance = f.Number("imb_tx");
  row.received_imbalance = f.Number("imb_rx");
  row.wait_pct = f.Number("wait_pct");
  row.wrong = f.Number("nwrong");
  row.source = f.Number("source");
  row.destination = f.Number("destination");
  row.pass = f.Text("pass");
  row.phase = f.Text("phase");
  if (row.algorithm.empty()) row.algorithm = f.Text("dispatch");
  row.rows = f.Number("rows");
  row.shape = ShapeOf(f, row.phase.empty());
  row.threads = f.Number("threads");
  row.memcpy_pct = f.Number("memcpy_pct");
  row.peak_pct = f.Number("peak_pct");
  row.gflops = f.Number("gflops_per_s");
  row.peak_gflops = f.Number("peak_gflops_per_s");
  run.bench.push_back(std::move(row));
  return f.status;
}

absl::Status AddSweep(Fields& f, Run& run) {
  SweepRow row;
  row.settings = f.Text("settings");
  row.text_hash = f.Text("text_xxh3");
  row.measure = f.Text("measure");
  row.backend = f.Text("backend");
  row.dtype = f.Text("dtype");
  row.router = f.Text("router");
  row.routing = f.Text("routing");
  row.dispatch = f.Text("dispatch");
  row.experts = f.Number("experts");
  row.top_k = f.Number("topk");
  row.capacity_factor = f.CapacityFactor("cf");
  row.ep = f.Number("ep");
  row.dp = f.Number("dp");
  row.ranks = f.Number("ranks");
  row.hidden = f.Number("hidden");
  row.ffn = f.Number("ffn");
  row.overlap = f.Number("overlap");
  row.tokens_per_rank = f.Number("tok_per_rank");
  row.params_total = f.Number("params_total");
  row.params_active = f.Number("params_active");
  row.tokens_per_s = f.Number("tok_s");
  row.tokens_per_s_sd = f.Number("tok_s_sd");
  row.step_ms = f.Number("step_ms");
  row.a2a_ms = f.Number("a2a_ms");
  row.all_reduce_ms = f.Number("ar_ms");
  row.expert_ms = f.Number("expert_ms");
  row.drop_initial_pct = f.Percent("drop_init");
  row.drop_final_pct = f.Percent("drop_end");
  row.max_violation = f.Number("max_vio");
  row.dead_experts = f.Number("dead");
  row.validation_loss = f.Real("val_loss");
  row.peak_mib = f.Number("peak_mib");
  row.status = f.Text("status");
  row.error = f.Text("error");
  run.sweep.push_back(std::move(row));
  return f.status;
}

// expert_load: [layer][expert], the same shape at every step.
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
  TrainStep row;
  row.step = f.Number("step");
  row.loss = f.Real("loss");
  row.validation_loss = f.Real("val_loss");
  row.tokens_per_s = f.Number("tokens_per_s");
  row.step_ms = f.Number("step_ms");
  row.a2a_ms = f.Number("a2a_ms");
  row.expert_ms = f.Number("expert_ms");
  row.all_reduce_ms = f.Number("all_reduce_ms");
  row.drop_fraction = f.Number("drop_fraction", 0, 1);
  row.max_violation = f.Number("max_vio");
  row.dead_experts = f.Number("dead_experts");
  row.peak_bytes = f.Number("peak_bytes");
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
  TrainTotals totals;
  totals.steps = f.Number("steps");
  totals.tokens = f.Number("tokens");
  totals.seconds = f.Number("seconds");
  totals.validation_loss_before = f.Real("val_loss_before");
  totals.validation_loss = f.Real("val_loss");
  totals.weights_hash = f.Text("weights_xxh3");
  run.totals = totals;
  return f.status;
}

}  // namespace

absl::Status AddRow(const Json& object, Run& run) {
  MOE_ASSIGN_OR_RETURN(const RunKind kind, KindOf(object));
  const bool first =
      run.bench.empty() && run.sweep.empty() && run.steps.empty() && !run.totals.has_value();
  if (!first && kind != run.kind) {
    return absl::DataLossError(absl::StrCat("a row of moe ", NameOf(kind),
                                            " stands among rows of moe ", NameOf(run.kind)));
  }
  run.kind = kind;
  Fields fields(object);
  switch (kind) {
    case RunKind::kBench:
      return AddBench(fields, run);
    case RunKind::kSweep:
      return AddSweep(fields, run);
    case RunKind::kTrain:
      return object.contains("step") ? AddStep(fields, run) : AddTotals(fields, run);
  }
  return absl::OkStatus();
}

}  // namespace moe::report
