#include "kernels/base/workspace.h"

#include <algorithm>
#include <functional>

#include <absl/strings/str_cat.h>

#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kSmallestChunk = int64_t{1} << 20;

}  // namespace

absl::StatusOr<std::byte*> Workspace::Take(int64_t bytes) {
  if (bytes < 0) {
    return absl::InvalidArgumentError(absl::StrCat("Workspace: ", bytes, " bytes, expected >= 0"));
  }
  const int64_t size = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  while (chunk_ < chunks_.size() && used_ + size > chunks_[chunk_].bytes()) {
    ++chunk_;
    used_ = 0;
  }
  if (chunk_ == chunks_.size()) {
    const int64_t last = chunks_.empty() ? kSmallestChunk : 2 * chunks_.back().bytes();
    absl::StatusOr<Buffer> made = Buffer::Allocate(std::max(size, last), *memory_, "Workspace");
    if (absl::IsResourceExhausted(made.status()) && size < last) {
      made = Buffer::Allocate(size, *memory_, "Workspace");  // the rounding up is for speed alone
    }
    MOE_ASSIGN_OR_RETURN(Buffer chunk, std::move(made));
    ++allocations_;
    chunks_.push_back(std::move(chunk));
    used_ = 0;
  }
  std::byte* const data = chunks_[chunk_].data() + used_;
  used_ += size;
  taken_ += size;
  peak_ = std::max(peak_, taken_);
  return data;
}

bool Workspace::Contains(const void* data) const {
  const auto* const at = static_cast<const std::byte*>(data);
  for (size_t i = 0; i < chunks_.size() && i <= chunk_; ++i) {
    const std::byte* const begin = chunks_[i].data();
    const int64_t taken = i == chunk_ ? used_ : chunks_[i].bytes();
    if (std::less_equal<>()(begin, at) && std::less<>()(at, begin + taken)) return true;
  }
  return false;
}

void Workspace::FillUnused(std::byte value) {
  if (memory_->device().kind != DeviceKind::kCpu) return;
  for (size_t i = chunk_; i < chunks_.size(); ++i) {
    const int64_t used = i == chunk_ ? used_ : 0;
    std::fill_n(chunks_[i].data() + used, chunks_[i].bytes() - used, value);
  }
}

void Workspace::Release(Mark mark) {
  chunk_ = mark.chunk;
  used_ = mark.used;
  taken_ = mark.taken;
  // A device's streams may still have work on the chunks: they are kept, and later steps use them
  // again.
  if (memory_->device().kind != DeviceKind::kCpu) return;
  if (chunk_ != 0 || used_ != 0 || chunks_.size() < 2) return;
  int64_t total = 0;
  for (const Buffer& chunk : chunks_) total += chunk.bytes();
  chunks_.clear();
  // On failure the next Take allocates what it needs and reports the error.
  Caught([&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(Buffer joined, Buffer::Allocate(total, *memory_, "Workspace"));
    ++allocations_;
    chunks_.push_back(std::move(joined));
    return absl::OkStatus();
  }).IgnoreError();
}

}  // namespace moe
