#include "moe/cli/train/mesh_choice.h"

#include <utility>

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/layout_settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/base/train_options.h"
#include "moe/cli/measure/machine_memory.h"
#include "moe/plan/mesh_search.h"

namespace moe::cli {
namespace {

constexpr char kExpert[] = "expert-model-parallel-size";
constexpr char kTensor[] = "tensor-model-parallel-size";
constexpr char kExpertTensor[] = "expert-tensor-parallel-size";
constexpr char kPipeline[] = "pipeline-model-parallel-size";
constexpr char kChunks[] = "num-virtual-stages-per-pipeline-rank";

constexpr const char* kChosen[] = {
    kExpert, kTensor, kExpertTensor, kPipeline, kChunks, "pipeline-schedule", "zero", "recompute"};

// Those of kChosen that have a value, "auto" aside.
class GivenLayout {
 public:
  explicit GivenLayout(const Settings& settings) : settings_(settings) {}

  bool Has(const plan::Layout& layout) const {
    return Number(kExpert, layout.mesh.expert) && Number(kTensor, layout.mesh.tensor) &&
           Number(kExpertTensor, layout.mesh.expert_tensor) &&
           Number(kPipeline, layout.mesh.pipeline) && Number(kChunks, layout.chunks) &&
           Word("pipeline-schedule", layout.schedule, kScheduleWords) &&
           Word("zero", layout.zero, kZeroWords) &&
           Word("recompute", layout.recompute, kRecomputeWords);
  }
  // Degrees that are not given are 1.
  MeshShape Mesh() const {
    const auto degree = [&](const char* name) {
      return Open(name) ? 1 : settings_.integer(name);
    };
    return {.tensor = degree(kTensor),
            .pipeline = degree(kPipeline),
            .expert_tensor = degree(kExpertTensor),
            .expert = degree(kExpert)};
  }
  // " with --zero 1"; empty: nothing is given.
  std::string Text() const {
    std::string text;
    for (const char* const name : kChosen) {
      if (!Open(name)) absl::StrAppend(&text, " --", name, " ", settings_.text(name));
    }
    return text.empty() ? text : absl::StrCat(" with", text);
  }

 private:
  bool Open(const char* name) const { return !settings_.given(name) || settings_.is(name, "auto"); }
  bool Number(const char* name, int value) const {
    return Open(name) || settings_.integer(name) == value;
  }
  template <typename T, size_t N>
  bool Word(const char* name, T value, const Choice<T> (&words)[N]) const {
    return Open(name) || settings_.is(name, NameOf(value, words));
  }

  const Settings& settings_;
};

// The settings of a run whose layout is not chosen yet: one that any ranks can have.
absl::StatusOr<TrainOptions> WithoutLayout(const Launch& launch, Settings settings) {
  const auto reset = [&](const char* name) {
    const Setting& row = *settings.Find(name);
    return settings.Set(row, {row.fallback}, Origin::kFlag, absl::StrCat("--", name));
  };
  for (const char* const name : kChosen) MOE_RETURN_IF_ERROR(reset(name));
  // Some ask for an EP; the layouts that are found are checked with theirs.
  for (const char* const name : {"dispatch", "node-size"}) MOE_RETURN_IF_ERROR(reset(name));
  return MakeTrainOptions(settings, launch.world);
}

// Of a rank; 0: not known.
double MemoryBytes(const Launch& launch) {
  if (launch.device.kind == DeviceKind::kCpu) {
    return static_cast<double>(measure::TotalMemoryBytes()) / launch.world.local_ranks;
  }
  const auto gpu = CudaDeviceAt(0);
  return gpu.ok() ? static_cast<double>(gpu->memory_bytes) : 0;
}

std::string LayoutText(const plan::Layout& layout) {
  const MeshShape& mesh = layout.mesh;
  std::string text =
      fmt::format("--pp {} --tp {} --ep {}", mesh.pipeline, mesh.tensor, mesh.expert);
  if (mesh.expert_tensor > 1) text += fmt::format(" --etp {}", mesh.expert_tensor);
  if (mesh.pipeline > 1) {
    text += fmt::format(" --pipeline-schedule {}", NameOf(layout.schedule, kScheduleWords));
    if (layout.chunks > 1) text += fmt::format(" --vp {}", layout.chunks);
  }
  return text + fmt::format(" --zero {} --recompute {}", NameOf(layout.zero, kZeroWords),
                            NameOf(layout.recompute, kRecomputeWords));
}

std::string ChoiceText(const plan::SearchResult& result, size_t chosen) {
  const plan::Candidate& best = result.fitting[chosen];
  std::string text = fmt::format(
      "mesh   {}: {:.3g} ms a step and {:.0f} MiB a rank predicted, the best of {} layouts",
      LayoutText(best.layout), best.time.total() * 1e3, best.memory.total_bytes() / 0x1p20,
      WithCommas(result.candidates));
  if (chosen + 1 == result.fitting.size()) return text + "\n";
  const plan::Candidate& next = result.fitting[chosen + 1];
  return text +
         fmt::format("; next {}: {:.3g} ms\n", LayoutText(next.layout), next.time.total() * 1e3);
}

}  // namespace

absl::StatusOr<std::string> ChooseMesh(const Launch& launch, Settings& settings) {
  if (!settings.empty("pipeline-layout")) {
    return WrongFlag("--mesh", "auto", "given, with --pipeline-layout: its stages are chosen");
  }
  const GivenLayout given(settings);
  MOE_ASSIGN_OR_RETURN(const TrainOptions options, WithoutLayout(launch, settings));
  const lm::TrainConfig& train = options.train;
  const plan::SearchOptions search = {
      .base = train,
      .ranks = launch.world.ranks,
      .sequences = train.trainer.micro_batches * train.micro_batch_size,
      .machine = MachineOf(launch, MemoryBytes(launch)),
      .micro_batch_size = train.micro_batch_size,
      .takes = [&](const plan::Layout& layout) {
        return given.Has(layout);
      }};
  MOE_ASSIGN_OR_RETURN(const plan::SearchResult result, plan::SearchMeshes(search));
  absl::Status refused;  // the first
  for (size_t i = 0; i < result.fitting.size(); ++i) {
    Settings chosen = WithLayout(settings, result.fitting[i]);
    MOE_RETURN_IF_ERROR(chosen.Set(*chosen.Find("mesh"), {"given"}, Origin::kFlag, "--mesh"));
    const absl::Status status = MakeTrainOptions(chosen, launch.world).status();
    if (refused.ok()) refused = status;
    if (!status.ok()) continue;
    settings = std::move(chosen);
    return ChoiceText(result, i);
  }
  if (!refused.ok()) return refused;
  if (!result.too_big.empty()) {
    const plan::Candidate& least = result.too_big.front();
    return absl::ResourceExhaustedError(fmt::format(
        "--mesh auto: no layout fits: the nearest, {}, needs {:.0f} MiB a rank of {:.0f}",
        LayoutText(least.layout), least.memory.total_bytes() / 0x1p20,
        search.machine.memory_bytes / 0x1p20));
  }
  std::string why;
  SessionOptions session = train.trainer.session;
  session.mesh = given.Mesh();
  if (!result.refused.empty()) {
    why = ": " + result.refused.begin()->second.first;
  } else if (const absl::Status alone = CheckMesh(session, launch.world.ranks); !alone.ok()) {
    why = absl::StrCat(": ", alone.message());
  }
  return WrongFlag("--mesh", "auto",
                   absl::StrCat("a layout of ", Counted(launch.world.ranks, "rank"), given.Text(),
                                ", of which there is none", why));
}

}  // namespace moe::cli
