// Which weights of a rank have room in a memory.
#ifndef MOE_MOE_ZERO_WEIGHT_ROOM_H_
#define MOE_MOE_ZERO_WEIGHT_ROOM_H_

#include <cstdint>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

namespace moe {

// Bytes of the weights of a rank. Pages: the matrices of a module without its experts, those of an
// expert; vectors are in memory always.
struct WeightSizes {
  struct Page {
    int64_t bytes = 0;
    int64_t frame_bytes = 0;  // in memory, when it is read from a file
  };
  int64_t vector_bytes = 0;
  std::vector<Page> modules;
  Page expert;  // the largest
  int64_t experts = 0;
};

// What a memory has room for.
struct WeightRoom {
  std::vector<bool> resident;  // by module; the others pass through module_frames
  int module_frames = 0;
  int64_t module_frame_bytes = 0;
  bool all_experts = false;   // all are resident; else they pass through expert_frames
  int64_t expert_frames = 0;  // of WeightSizes::expert
};
// Everything where it fits. Else modules first, which every token reads, and experts with what is
// left; if the modules do not fit beside an expert, as many as fit beside two frames of the largest
// module and two of experts, or one of each. kInvalidArgument, with the smallest memory that would
// do, for less than that.
absl::StatusOr<WeightRoom> RoomFor(const WeightSizes& sizes, int64_t memory_bytes);
// The smallest memory for which RoomFor has a room.
int64_t LeastMemory(const WeightSizes& sizes);
// The refusal of a memory.
absl::Status TooLittleMemory(int64_t memory_bytes, int64_t least);

}  // namespace moe

#endif  // MOE_MOE_ZERO_WEIGHT_ROOM_H_
