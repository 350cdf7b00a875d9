// State of an optimiser in a scratch file: pages of it are in memory while they are used.
#ifndef MOE_MOE_ZERO_OFFLOAD_H_
#define MOE_MOE_ZERO_OFFLOAD_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "moe/io/scratch_file.h"
#include "moe/state/boxes.h"
#include "moe/zero/shard_cut.h"
#include "moe/zero/state_placement.h"

namespace moe {

// What a user of state does with it.
enum class StateUse : uint8_t {
  kRead,
  kUpdate,     // reads and changes it
  kOverwrite,  // writes all of it, whatever it was
};

// The elements that this rank keeps of a bucket, cut between row groups into ranges whose state, of
// `element_bytes` an element, has `page_bytes` to the nearest row group.
std::vector<ElementRange> PagesOf(const ParameterBucket& bucket, int64_t element_bytes,
                                  int64_t page_bytes);

// A scratch file of pages, and two buffers as large as the largest. A thread of its own writes the
// page that was released last and then reads the next one, while the caller works on the page that
// it holds. Pages are best acquired in ascending order, again and again. Used by one thread.
class StateFile {
 public:
  // All pages are zeros. Errors of ScratchFile::Create; kResourceExhausted for the buffers or the
  // thread. At least one page; `rank` is part of the file's name.
  static absl::StatusOr<std::unique_ptr<StateFile>> Create(const StateFileOptions& options,
                                                           int rank,
                                                           absl::Span<const int64_t> page_bytes);
  // What is still to be written is dropped. Blocks until the thread's call to the system returns.
  ~StateFile();
  StateFile(const StateFile&) = delete;
  StateFile& operator=(const StateFile&) = delete;

  // The bytes of a page, of at least its size, until Release; of unknown content for kOverwrite.
  // One page at a time. Blocks until the page is in memory. The error of any read or write so far,
  // as ScratchFile's.
  absl::StatusOr<absl::Span<std::byte>> Acquire(size_t page, StateUse use);
  // Ends the use of the page that Acquire returned. Unless it was kRead, the page is written in the
  // background.
  void Release();

  // Bytes of memory.
  int64_t bytes() const;

 private:
  static constexpr size_t kNone = ~size_t{0};
  struct Frame {
    Buffer memory;
    absl::Span<std::byte> bytes;  // aligned in `memory`
    size_t page = kNone;          // whose bytes it has once it is idle
    // What the thread does with it: it writes the page that the frame had, then reads `page`.
    size_t to_write = kNone;
    bool to_read = false;
    int64_t since = 0;  // place among all requests and uses

    bool idle() const { return to_write == kNone && !to_read; }
  };
  StateFile(ScratchFile file, absl::Span<const int64_t> page_bytes);
  Frame& FrameFor(size_t page);
  // Bytes of the page in a frame.
  absl::Span<std::byte> BytesOf(size_t page, const Frame& frame) const;
  void RunRequests();

  const ScratchFile file_;
  std::vector<int64_t> first_byte_ = {0};  // first byte of each page, and the end
  Frame frames_[2];
  Frame* held_ = nullptr;
  StateUse use_ = StateUse::kRead;  // use of the page that is held

  std::mutex mu_;
  std::condition_variable changed_;
  absl::Status status_;   // guarded by mu_, as to_write, to_read and since of the frames
  int64_t requests_ = 0;  // guarded by mu_
  bool stops_ = false;    // guarded by mu_
  std::thread thread_;    // last: it uses all of the above
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_OFFLOAD_H_
