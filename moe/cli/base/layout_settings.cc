#include "moe/cli/base/layout_settings.h"

#include <string>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe::cli {

Settings WithLayout(Settings train, const plan::Candidate& candidate) {
  const plan::Layout& layout = candidate.layout;
  const auto set = [&](const char* name, std::string text) {
    MOE_CHECK(train.Set(*train.Find(name), {std::move(text)}, Origin::kFlag, "").ok());
  };
  set("expert-model-parallel-size", absl::StrCat(layout.mesh.expert));
  set("tensor-model-parallel-size", absl::StrCat(layout.mesh.tensor));
  set("expert-tensor-parallel-size", absl::StrCat(layout.mesh.expert_tensor));
  set("pipeline-model-parallel-size", absl::StrCat(layout.mesh.pipeline));
  set("num-virtual-stages-per-pipeline-rank", absl::StrCat(layout.chunks));
  if (layout.mesh.pipeline > 1) {
    set("pipeline-schedule", NameOf(layout.schedule, kScheduleWords));
  }
  set("zero", NameOf(layout.zero, kZeroWords));
  set("recompute", NameOf(layout.recompute, kRecomputeWords));
  set("micro-batch-size", absl::StrCat(layout.micro_batch_size));
  set("micro-batches", absl::StrCat(plan::MicroBatches(candidate.work, layout)));
  return train;
}

plan::Machine MachineOf(const Launch& launch, double memory_bytes) {
  const World& world = launch.world;
  if (launch.device.kind == DeviceKind::kCpu) {
    return plan::MachineOfCores(world.local_ranks, world.cores, memory_bytes);
  }
  plan::Machine machine = plan::MachineOf(*plan::FindGpu("h100"));
  machine.node_ranks = world.local_ranks;
  if (memory_bytes > 0) machine.memory_bytes = memory_bytes;
  return machine;
}

}  // namespace moe::cli
