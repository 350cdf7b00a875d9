#include "moe/zero/weight_room.h"

#include <algorithm>
#include <cstddef>

#include <absl/strings/str_cat.h>

namespace moe {

absl::Status TooLittleMemory(int64_t memory_bytes, int64_t least) {
  return absl::InvalidArgumentError(
      absl::StrCat("--weight-memory is ", memory_bytes, ", expected at least ", least,
                   " bytes: the largest module and an expert are in memory at a time"));
}

int64_t LeastMemory(const WeightSizes& sizes) {
  int64_t modules = 0, largest = 0;
  for (const WeightSizes::Page& module : sizes.modules) {
    modules += module.bytes;
    largest = std::max(largest, module.frame_bytes);
  }
  const int64_t expert = sizes.experts > 0 ? sizes.expert.frame_bytes : 0;
  const int64_t all_experts = sizes.experts * sizes.expert.bytes;
  return sizes.vector_bytes + std::min(modules + std::min(all_experts, expert), largest + expert);
}

absl::StatusOr<WeightRoom> RoomFor(const WeightSizes& sizes, int64_t memory_bytes) {
  int64_t modules = 0, largest = 0;
  for (const WeightSizes::Page& module : sizes.modules) {
    modules += module.bytes;
    largest = std::max(largest, module.frame_bytes);
  }
  const int64_t each = sizes.expert.frame_bytes;
  const auto frames_in = [&](int64_t bytes) {
    return each == 0 ? 0 : std::min(sizes.experts, bytes / each);
  };
  const int64_t rest = memory_bytes - sizes.vector_bytes;
  const int64_t all_experts = sizes.experts * sizes.expert.bytes;
  WeightRoom room = {.resident = std::vector<bool>(sizes.modules.size(), true)};
  room.all_experts = modules + all_experts <= rest;
  if (room.all_experts) return room;
  room.expert_frames = frames_in(rest - modules);
  if (modules <= rest && room.expert_frames > 0) return room;
  for (const int frames : {2, 1}) {
    const int64_t experts = std::min<int64_t>(sizes.experts, frames);
    int64_t left = rest - frames * largest - experts * each;
    if (left < 0) continue;
    room.module_frames = frames;
    room.module_frame_bytes = largest;
    for (size_t m = 0; m < sizes.modules.size(); ++m) {
      room.resident[m] = sizes.modules[m].bytes <= left;
      if (room.resident[m]) left -= sizes.modules[m].bytes;
    }
    room.expert_frames = std::min(sizes.experts, experts + frames_in(left));
    return room;
  }
  return TooLittleMemory(memory_bytes, LeastMemory(sizes));
}

}  // namespace moe
