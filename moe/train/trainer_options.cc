// What follows from the options of a trainer.
#include <absl/strings/str_cat.h>

#include "kernels/base/dtype.h"
#include "moe/train/trainer.h"

namespace moe {

PipelineShape PipelineOf(const TrainerOptions& options) {
  PipelineShape shape = {.schedule = options.pipeline_schedule,
                         .stages = options.session.mesh.pipeline,
                         .chunks = options.pipeline_chunks};
  if (shape.chunks > 1 && shape.schedule == ScheduleKind::k1F1B) {
    shape.schedule = ScheduleKind::kInterleaved;
  }
  return shape;
}

bool HasBFloat16Order(const TrainerOptions& options) {
  return options.dtype == DType::kBFloat16 && options.session.device == DeviceKind::kCpu;
}

absl::Status CheckBFloat16Order(const TrainerOptions& options) {
  const std::optional<BFloat16Order>& order = options.session.bfloat16_order;
  if (!order.has_value() || HasBFloat16Order(options)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--bf16-order is ", NameOf(*order, kBFloat16OrderWords), " with ",
      options.session.device == DeviceKind::kCpu ? absl::StrCat("--dtype ", NameOf(options.dtype))
                                                 : "--device cuda",
      ", expected auto: it is an order of products of bf16 on a CPU"));
}

}  // namespace moe
