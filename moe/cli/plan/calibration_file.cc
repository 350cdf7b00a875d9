#include "moe/cli/plan/calibration_file.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <tuple>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include <nlohmann/json.hpp>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/train_options.h"
#include "moe/io/bounded_json.h"
#include "moe/io/file.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {
namespace {

using Json = nlohmann::json;

constexpr double kMostRanks = 1e6;  // of a run

// A row, whose values are asked for by key; the first that is wrong is kept.
class CalibrationRow {
 public:
  explicit CalibrationRow(const Json& json) : json_(json) {}

  std::string Text(const char* key) {
    const auto found = json_.find(key);
    if (found == json_.end() || found->is_null()) return "";
    if (!found->is_string()) return Wrong(key, "a text"), "";
    return *found;
  }
  // At least 0.
  double Number(const char* key) {
    const auto found = json_.find(key);
    if (found != json_.end() && found->is_number() && found->get<double>() >= 0) return *found;
    Wrong(key, "a number of at least 0");
    return 1;
  }
  double Positive(const char* key) {
    const double number = Number(key);
    if (number > 0) return number;
    Wrong(key, "a number above 0");
    return 1;
  }
  const absl::Status& status() const { return status_; }

 private:
  void Wrong(const char* key, const char* expected) {
    if (!status_.ok()) return;
    const auto found = json_.find(key);
    status_ = absl::DataLossError(
        absl::StrCat("'", key, "' is ", found == json_.end() ? "absent" : Shown(found->dump()),
                     ", expected ", expected));
  }

  const Json& json_;
  absl::Status status_;
};

// A run of moe train, from the lines of its metrics.jsonl.
class CalibrationRun {
 public:
  // The first line, of a run of `ranks` ranks on threads or MPI.
  static absl::StatusOr<CalibrationRun> Begin(const Json& line, int ranks) {
    const auto given = line.find("settings");
    if (given == line.end() || !given->is_object()) {
      return absl::DataLossError("'settings' is no object");
    }
    Settings settings(TrainSettings());
    for (const auto& [name, value] : given->items()) {
      const Setting* const setting = settings.Find(name);
      std::vector<std::string> texts;
      for (const Json& text : value.is_array() ? value : Json::array({value})) {
        if (text.is_string()) texts.push_back(text);
      }
      if (setting == nullptr || texts.empty()) {
        return absl::DataLossError(
            absl::StrCat("'settings.", Shown(name), "' is no setting of moe train, or no text"));
      }
      MOE_RETURN_IF_ERROR(
          settings.Set(*setting, std::move(texts), Origin::kFile, absl::StrCat("--", name)));
    }
    MOE_ASSIGN_OR_RETURN(const TrainOptions options,
                         MakeTrainOptions(settings, {.ranks = ranks, .local_ranks = ranks}));
    CalibrationRun run;
    run.dtype_ = settings.text("dtype");
    run.step_ = {.cost = plan::CostOf(options.train.model),
                 .work = plan::WorkloadOf(options.train, ranks),
                 .layout = plan::LayoutOf(options.train)};
    return run;
  }

  // A line of a step. The first step makes memory, and does not count.
  void Add(CalibrationRow& row) {
    const double step_ms = row.Positive("step_ms");
    if (row.Positive("step") <= first_) return;
    if (first_ == 0) {
      first_ = row.Positive("step");
      return;
    }
    if (shortest_ms_ > 0 && step_ms >= shortest_ms_) return;
    shortest_ms_ = step_ms;
    step_.SetParts([&](const char* key) { return row.Number(key); });
  }

  bool measured() const { return shortest_ms_ > 0; }
  const plan::TrainedStep& step() const { return step_; }
  const std::string& dtype() const { return dtype_; }

 private:
  std::string dtype_;
  plan::TrainedStep step_;
  double first_ = 0;  // step; 0: not yet
  double shortest_ms_ = 0;
};

class CalibrationReader {
 public:
  CalibrationReader(int ranks, const std::string& dtype) : ranks_(ranks), dtype_(dtype) {}

  absl::Status Add(const Json& json) {
    if (!json.is_object()) return absl::DataLossError("a row is no object");
    CalibrationRow row(json);
    const std::string op = row.Text("op"), status = row.Text("status");
    if (row.Text("schema") == "moe.train/1") return BeginRun(json, row);
    MOE_RETURN_IF_ERROR(row.status());
    if (run_.has_value() && json.contains("step")) return run_->Add(row), row.status();
    static constexpr const char* kRead[] = {"layer", "alltoall", "alltoallv", "allreduce",
                                            "memcpy"};
    const bool read = std::find(std::begin(kRead), std::end(kRead), op) != std::end(kRead);
    if (!read || status != "ok") return absl::OkStatus();
    MOE_RETURN_IF_ERROR(CheckOrigin(row));
    const bool local = row.Text("backend") == "local" || file_.on_cpu;
    if (local && row.Positive("ranks") != ranks_) return row.status();
    // Experts that ranks share wait for rows and sums.
    const auto share = json.find("expert_tensor_parallel_size");
    if (share != json.end() && *share != 1) return row.status();
    op == "layer" ? AddLayer(row) : AddCalls(op, row);
    return row.status();
  }

  // The run's lines are all read.
  void EndRun() {
    if (run_.has_value() && run_->measured() && run_->dtype() == dtype_) {
      file_.samples.steps.push_back(run_->step());
    }
    run_.reset();
  }

  CalibrationFile Take() {
    for (const auto& [shape, seconds] : layers_) file_.samples.layer_s.push_back(seconds);
    return std::move(file_);
  }

 private:
  absl::Status BeginRun(const Json& json, CalibrationRow& row) {
    EndRun();
    const double ranks = row.Positive("ranks");
    const auto facts = json.find("provenance");
    if (facts == json.end() || !facts->is_object()) {
      return absl::DataLossError("'provenance' is no object");
    }
    CalibrationRow origin(*facts);
    MOE_RETURN_IF_ERROR(CheckOrigin(origin));
    if (file_.on_cpu && ranks != ranks_) return row.status();
    if (ranks != std::floor(ranks) || ranks > kMostRanks) {
      return absl::DataLossError("'ranks' is no number of ranks");
    }
    MOE_RETURN_IF_ERROR(row.status());
    MOE_ASSIGN_OR_RETURN(run_, CalibrationRun::Begin(json, static_cast<int>(ranks)));
    return absl::OkStatus();
  }

  absl::Status CheckOrigin(CalibrationRow& row) {
    const std::pair<const char*, std::string*> origin[] = {{"host", &file_.host},
                                                           {"cpu", &file_.cpu},
                                                           {"gpu", &file_.gpu},
                                                           {"version", &file_.version},
                                                           {"commit", &file_.commit}};
    for (const auto& [key, value] : origin) {
      const std::string mine = row.Text(key);
      if (first_) *value = mine;
      if (mine == *value) continue;
      return absl::DataLossError(absl::StrCat("'", key, "' is ", Shown(mine), ", in rows before ",
                                              Shown(*value),
                                              ", expected rows of one machine and build"));
    }
    first_ = false;
    file_.on_cpu = file_.gpu.empty();
    return row.status();
  }

  void AddLayer(CalibrationRow& row) {
    if (row.Text("dtype") != dtype_) return;
    const std::string phase = row.Text("phase");
    const double tokens = row.Positive("tokens");
    if (phase == "expert") {
      const double rows = tokens * row.Positive("expert_parallel_size") * row.Positive("topk") /
                          row.Positive("experts");
      file_.samples.products.push_back(
          {.rows = rows,
           .flops_per_s = row.Positive("gflops_per_s") * 1e9 / row.Positive("ranks")});
    } else if (phase == "gate" || phase == "plan") {
      // The time that is there with few tokens; both passes have these phases.
      const auto shape = std::tuple(tokens, row.Positive("hidden"), row.Positive("ffn"),
                                    row.Positive("expert_parallel_size"));
      layers_[shape] += row.Number("time_us") * 1e-6;
    }
  }

  void AddCalls(const std::string& op, CalibrationRow& row) {
    const double size = row.Positive("size_bytes"), seconds = row.Positive("time_us_p50") * 1e-6;
    const double ranks = row.Positive("ranks");
    if (op == "memcpy") {
      double& copied = file_.samples.copied_bytes_per_s;
      copied = std::max(copied, 2 * size / seconds);
      return;
    }
    if (ranks < 2) return;
    const bool network = row.Positive("hosts") > 1, sums = op == "allreduce";
    const double bytes = size * (ranks - 1) / ranks * (sums ? 2 : 1);
    plan::Calibration& s = file_.samples;
    (network ? (sums ? s.network_sums : s.network) : (sums ? s.sums : s.exchange))
        .push_back({.bytes = bytes, .seconds = seconds});
  }

  const int ranks_;
  const std::string& dtype_;
  bool first_ = true;
  CalibrationFile file_;
  std::optional<CalibrationRun> run_;  // whose lines are read
  std::map<std::tuple<double, double, double, double>, double> layers_;
};

absl::Status MissingRows(const std::string& what, const CalibrationFile& file, int ranks,
                         const std::string& dtype) {
  const std::string on = file.on_cpu ? absl::StrCat(" --ranks ", ranks) : "";
  const std::string layer = absl::StrCat("moe bench layer", on, " --dtype ", dtype,
                                         " --tokens 64 -J layer.json, and with more tokens");
  return absl::InvalidArgumentError(absl::StrCat(
      "no ", what, on.empty() ? "" : absl::StrCat(" of ", ranks, " ranks"), ", in ", dtype, ": ",
      layer, "; moe bench memcpy", on, " -J memcpy.json; moe bench alltoallv", on,
      " -b 64K -e 4M -J alltoallv.json; moe bench allreduce", on,
      " -d i64 -b 64K -e 4M -J allreduce.json; or, for more parts of a step, metrics.jsonl of runs "
      "of moe train",
      on, " --dtype ", dtype, " --out DIR"));
}

}  // namespace

absl::StatusOr<CalibrationFile> ParseCalibration(absl::Span<const CalibrationText> texts, int ranks,
                                                 const std::string& dtype) {
  CalibrationReader reader(ranks, dtype);
  for (const CalibrationText& text : texts) {
    const auto add = [&](const Json& row) {
      return reader.Add(row);
    };
    MOE_RETURN_IF_ERROR(ReadJsonRows(text.file, text.text, {}, add));
    reader.EndRun();
  }
  CalibrationFile file = reader.Take();
  const plan::Calibration& samples = file.samples;
  const auto& steps = samples.steps;
  const bool trained = !steps.empty();
  if (!trained && (samples.products.empty() || samples.layer_s.empty())) {
    return MissingRows("rows of a layer", file, ranks, dtype);
  }
  if (!trained && samples.copied_bytes_per_s <= 0) {
    return MissingRows("rows of memcpy", file, ranks, dtype);
  }
  const bool exchanged = std::any_of(steps.begin(), steps.end(), [](const plan::TrainedStep& step) {
    return step.layout.mesh.expert > 1;
  });
  if (ranks > 1 && !exchanged && samples.exchange.empty() && samples.network.empty()) {
    return MissingRows("rows of alltoallv", file, ranks, dtype);
  }
  return file;
}

absl::StatusOr<CalibrationFile> ReadCalibration(absl::Span<const std::string> paths, int ranks,
                                                const std::string& dtype) {
  std::vector<MappedFile> files;
  std::vector<CalibrationText> texts;
  for (const std::string& path : paths) {
    auto file = MappedFile::Open(path);
    if (!file.ok()) return InputError("--calibrate", file.status());
    files.push_back(*std::move(file));
    texts.push_back({path, files.back().text()});
  }
  auto calibration = ParseCalibration(texts, ranks, dtype);
  if (!calibration.ok()) return InputError("--calibrate", calibration.status());
  return calibration;
}

std::string OtherOrigin(const CalibrationFile& file) {
  std::vector<std::string> others;
  for (const auto& [key, value] : Provenance()) {
    const std::string* const theirs = key == "host"      ? &file.host
                                      : key == "cpu"     ? &file.cpu
                                      : key == "version" ? &file.version
                                      : key == "commit"  ? &file.commit
                                                         : nullptr;
    if (theirs == nullptr || *theirs == value) continue;
    others.push_back(absl::StrCat(key, " ", Shown(*theirs), " (here ", value, ")"));
  }
  return absl::StrJoin(others, ", ");
}

}  // namespace moe::cli
