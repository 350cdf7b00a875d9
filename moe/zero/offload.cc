#include "moe/zero/offload.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

int64_t AlignedBytes(int64_t bytes) {
  constexpr int64_t kUnit = ScratchFile::kAlignment;
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

}  // namespace

std::vector<ElementRange> PagesOf(const ParameterBucket& bucket, int64_t element_bytes,
                                  int64_t page_bytes) {
  const int64_t most = std::max<int64_t>(1, page_bytes / element_bytes);
  std::vector<ElementRange> pages;
  const ElementRange kept = bucket.kept();
  for (int64_t begin = kept.begin; begin < kept.end;) {
    int64_t end = begin;
    for (int64_t size = most; end <= begin; size += most) {  // a row group may be larger
      end = std::min(kept.end, CutNear(bucket, begin + size));
    }
    pages.push_back({begin, end});
    begin = end;
  }
  return pages;
}

absl::StatusOr<std::unique_ptr<StateFile>> StateFile::Create(const StateFileOptions& options,
                                                             int rank,
                                                             absl::Span<const int64_t> page_bytes) {
  int64_t bytes = 0, largest = 0;
  for (const int64_t page : page_bytes) {
    bytes += AlignedBytes(page);
    largest = std::max(largest, AlignedBytes(page));
  }
  MOE_ASSIGN_OR_RETURN(
      ScratchFile file,
      ScratchFile::Create(options.folder, absl::StrCat("moe-optimizer-rank-", rank), bytes));
  auto state = std::unique_ptr<StateFile>(new StateFile(std::move(file), page_bytes));
  for (Frame& frame : state->frames_) {
    MOE_ASSIGN_OR_RETURN(frame.memory, Buffer::Allocate(largest + ScratchFile::kAlignment,
                                                        CpuMemory(), "pages of optimiser state"));
    const auto address = reinterpret_cast<uintptr_t>(frame.memory.data());
    const auto skipped = static_cast<size_t>(AlignedBytes(static_cast<int64_t>(address)) -
                                             static_cast<int64_t>(address));
    frame.bytes = frame.memory.span<std::byte>().subspan(skipped, static_cast<size_t>(largest));
  }
  try {
    state->thread_ = std::thread([state = state.get()] { state->RunRequests(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread for '", state->file_.path(), "': ", error.what()));
  }
  return state;
}

StateFile::StateFile(ScratchFile file, absl::Span<const int64_t> page_bytes)
    : file_(std::move(file)) {
  for (const int64_t page : page_bytes)
    first_byte_.push_back(first_byte_.back() + AlignedBytes(page));
}

StateFile::~StateFile() {
  if (!thread_.joinable()) return;
  {
    const std::lock_guard lock(mu_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

int64_t StateFile::bytes() const {
  return frames_[0].memory.bytes() + frames_[1].memory.bytes();
}

absl::StatusOr<absl::Span<std::byte>> StateFile::Acquire(size_t page, StateUse use) {
  MOE_CHECK(held_ == nullptr && page + 1 < first_byte_.size());
  std::unique_lock lock(mu_);
  Frame& frame = FrameFor(page);
  if (frame.page != page) {
    changed_.wait(lock, [&] { return frame.idle() || !status_.ok(); });
    frame.page = page;
    frame.to_read = use != StateUse::kOverwrite;
    frame.since = ++requests_;
    if (frame.to_read) changed_.notify_all();
  }
  changed_.wait(lock, [&] { return frame.idle() || !status_.ok(); });
  MOE_RETURN_IF_ERROR(status_);
  held_ = &frame;
  use_ = use;
  frame.since = ++requests_;
  // The next page comes while the caller works on this one.
  const size_t pages = first_byte_.size() - 1, next = (page + 1) % pages;
  Frame& other = frames_[&frame == frames_ ? 1 : 0];
  if (use != StateUse::kOverwrite && next != page && other.page != next && !other.to_read) {
    other.page = next;
    other.to_read = true;
    other.since = ++requests_;
    changed_.notify_all();
  }
  return BytesOf(page, frame);
}

absl::Span<std::byte> StateFile::BytesOf(size_t page, const Frame& frame) const {
  return frame.bytes.first(static_cast<size_t>(first_byte_[page + 1] - first_byte_[page]));
}

// The frame that has the page, or that was used longest ago.
StateFile::Frame& StateFile::FrameFor(size_t page) {
  for (Frame& frame : frames_) {
    if (frame.page == page) return frame;
  }
  return frames_[0].since < frames_[1].since ? frames_[0] : frames_[1];
}

void StateFile::Release() {
  MOE_CHECK(held_ != nullptr);
  Frame& frame = *std::exchange(held_, nullptr);
  if (use_ == StateUse::kRead) return;
  {
    const std::lock_guard lock(mu_);
    frame.to_write = frame.page;
    frame.since = ++requests_;
  }
  changed_.notify_all();
}

// Runs on the thread.
void StateFile::RunRequests() {
  std::unique_lock lock(mu_);
  while (true) {
    Frame* next = nullptr;  // the frame whose request is the oldest
    for (Frame& frame : frames_) {
      if (!frame.idle() && (next == nullptr || frame.since < next->since)) next = &frame;
    }
    if (stops_ || !status_.ok()) return;
    if (next == nullptr) {
      changed_.wait(lock);
      continue;
    }
    const bool writes = next->to_write != kNone;
    const size_t page = writes ? next->to_write : next->page;
    lock.unlock();
    const absl::Span<std::byte> bytes = BytesOf(page, *next);
    const absl::Status done =
        writes ? file_.Write(first_byte_[page], bytes) : file_.Read(first_byte_[page], bytes);
    lock.lock();
    status_.Update(done);
    if (writes) {
      next->to_write = kNone;
    } else {
      next->to_read = false;
    }
    changed_.notify_all();
  }
}

}  // namespace moe
