// Weights in a scratch file: pages of them are in memory while they are used, for models that do
// not fit.
#ifndef MOE_MOE_ZERO_WEIGHT_PAGER_H_
#define MOE_MOE_ZERO_WEIGHT_PAGER_H_

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/buffer.h"
#include "moe/io/scratch_file.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"
#include "moe/state/weight_lease.h"
#include "moe/zero/weight_room.h"

namespace moe {

struct WeightFileOptions {
  std::string folder = {};   // an existing one, with room for what does not fit
  int64_t memory_bytes = 0;  // most bytes of weights in memory of a rank
};

// What became of weights in a file: of a rank, or of several.
struct PagingReport {
  int64_t memory_bytes = 0;  // of weights, frames included
  int64_t file_bytes = 0;
  int64_t experts = 0, experts_in_memory = 0;
  // Experts that a pass needed: found in memory, and read.
  int64_t hits = 0, misses = 0;
  int64_t module_reads = 0;
  int64_t bytes_read = 0;
  double wait_seconds = 0;  // that passes waited for reads; of several ranks the longest

  double hit_rate() const {
    const auto needed = static_cast<double>(hits + misses);
    return needed > 0 ? static_cast<double>(hits) / needed : 1;
  }
};

// Keeps the matrices of a model for inference within a bound of memory, the rest in a scratch file.
// A lease of a module has all but its experts; of these ForExperts reads the ones that have rows.
//
// An expert that is read takes the place of the one that was used longest ago: of its own layer
// once that has its share of the frames, otherwise of layers with more than theirs. Of the experts
// that a pass needs, those in memory are computed first, while a thread reads the others: a pass
// over all experts, layer by layer, finds as many as there are frames, if these are two a layer or
// more. Modules that pass through frames are read one ahead, in the order of a forward.
//
// The values that a pass reads have the bits of those in memory. Used by one thread. CPU.
class WeightPager final : public WeightSource {
 public:
  // `modules`: what is leased at once, in the order of a forward, of a store whose parameters are
  // deferred (ParameterStore::set_deferred); what is in none of them is resident. Gives all of them
  // memory: of the file, mapped, what will not be resident, and masters that no layer reads in a
  // file of their own, so that loading weights takes no memory either. Borrows store and context.
  // Collective over the world, blocks. kUnimplemented on a CUDA device, and where ranks share
  // experts; RoomFor's refusal, on every rank, with what the one with most weights needs; errors of
  // ScratchFile::Create; kResourceExhausted.
  static absl::StatusOr<std::unique_ptr<WeightPager>> Create(
      absl::Span<const std::vector<Parameter*>> modules, ParameterStore& store,
      const Context& context, const WeightFileOptions& options);
  // Frees the values that are in the file. No lease may be left.
  ~WeightPager() override;

  // Once all values are written: what is not resident leaves memory for the file, from which passes
  // read it. FileError with kWrite; kResourceExhausted for frames or thread.
  absl::Status Begin();

  // Errors: those of any read so far, as ScratchFile's.
  absl::Status Acquire(const Pass& pass, absl::Span<Parameter* const> parameters) override;
  void Release(absl::Span<Parameter* const> parameters) override;
  absl::Status ForExperts(const Pass& pass, const ExpertRows& experts,
                          ComputeExperts compute) override;

  // Of this rank, since Begin.
  PagingReport report() const;

 private:
  static constexpr int kNone = -1;
  struct Part {
    Parameter* parameter;
    int64_t file_byte = 0, bytes = 0;
    int64_t frame_byte = 0;  // where its unit of the file begins in a frame
  };
  struct Page {
    std::vector<Part> parts;
    size_t module = 0;
    bool is_expert = false;
    int64_t frame_bytes = 0;
    int frame = kNone;   // that has it, or into which it is being read
    int64_t leases = 0;  // of its parameters
  };
  struct Frame {
    Buffer memory;
    std::byte* first = nullptr;  // aligned in `memory`
    int page = kNone;
    bool reading = false;  // guarded by mu_
    int64_t used = 0;      // when: the larger, the later
  };
  class Mapped;

  WeightPager(ParameterStore& store, const Context& context, const WeightFileOptions& options);
  void AddPages(absl::Span<const std::vector<Parameter*>> modules);
  void AddPage(std::vector<Parameter*> parameters, size_t module, bool is_expert);
  WeightSizes Sizes() const;
  absl::Status Provide();
  int64_t SlabBytes(const Parameter& first) const;
  absl::Status MakeFrames(std::deque<Frame>& frames, int64_t count, int64_t bytes);
  // Whether the page is read from the file.
  bool Passes(const Page& page) const {
    return page.is_expert ? !room_.all_experts : !room_.resident[page.module];
  }
  Page* PageOf(const Parameter& parameter);  // nullptr: it is in none
  int64_t BytesOf(const Parameter& parameter) const;
  absl::Status LoadModule(const Pass& pass, Page& page);
  void ReadNextModule(const Page& page);
  Frame* FreeModuleFrame();
  Frame* FreeExpertFrame(const Page& page);
  Frame& FrameOf(const Page& page);
  // Lets the thread read the page into a frame that no lease uses.
  void Read(Page& page, Frame& frame);
  absl::Status Await(const Pass& pass, const Frame& frame);
  bool IsReady(const Frame& frame);
  void Show(const Page& page);
  void Hide(const Page& page);
  absl::Status ReadPage(const Page& page, const Frame& frame) const;
  void RunRequests();

  ParameterStore& store_;
  const Context context_;
  const WeightFileOptions options_;
  std::deque<Page> pages_;
  std::vector<int> page_of_;          // by Parameter::index; kNone: a vector, or in no module
  std::vector<int> module_pages_;     // in the order of a forward; of those in a file
  std::vector<int64_t> module_held_;  // frames with experts of each module
  int64_t expert_layers_ = 0;
  WeightRoom room_;
  int64_t resident_bytes_ = 0, file_bytes_ = 0;
  std::optional<ScratchFile> file_;
  std::unique_ptr<Mapped> mapped_;           // until Begin
  std::shared_ptr<MemoryResource> masters_;  // until Begin
  std::deque<Frame> expert_frames_, module_frames_;
  size_t module_at_ = 0;  // place in module_pages_ of the page that was leased last
  int64_t uses_ = 0;      // of frames so far
  PagingReport report_;

  std::mutex mu_;
  std::condition_variable changed_;
  std::deque<Frame*> requests_;  // guarded by mu_
  absl::Status status_;          // guarded by mu_
  bool stops_ = false;           // guarded by mu_
  std::thread thread_;           // last: it uses all of the above
};

}  // namespace moe

#endif  // MOE_MOE_ZERO_WEIGHT_PAGER_H_
