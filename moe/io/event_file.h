// Records of TensorBoard's event files: TFRecords, each an Event of TensorFlow's event.proto.
#ifndef MOE_MOE_IO_EVENT_FILE_H_
#define MOE_MOE_IO_EVENT_FILE_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

namespace moe {

// CRC-32C (Castagnoli). A table by bytes: about 0.4 GB/s.
uint32_t Crc32c(absl::string_view bytes);

// The bytes framed as a TFRecord: their length (uint64) and its masked CRC, the bytes and their
// masked CRC, all little-endian.
std::string TfRecord(absl::string_view bytes);

// What a step reports. Tags name curves: the part before the last "/" is a group.
struct EventScalar {
  std::string tag;
  double value = 0;  // stored as float32
};
struct EventHistogram {
  std::string tag;
  std::vector<int64_t> counts;  // samples of value 0, 1, ...
};

// Records of a file, the version first; each is whole, and has its time.
std::string VersionRecord(absl::Time now);
// What other files of the folder have of `step` and later ones no longer counts.
std::string RestartRecord(absl::Time now, int64_t step);
std::string StepRecord(absl::Time now, int64_t step, absl::Span<const EventScalar> scalars,
                       absl::Span<const EventHistogram> histograms);

}  // namespace moe

#endif  // MOE_MOE_IO_EVENT_FILE_H_
