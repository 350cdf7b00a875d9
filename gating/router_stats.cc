#include "gating/router_stats.h"

#include <limits>
#include <utility>

#include "kernels/base/status_macros.h"
#include "kernels/router_loss/router_loss.h"

namespace moe {

absl::Status RouterStats::Arrival::Wait() {
  if (passed.state() == nullptr) return absl::OkStatus();
  return MakeInlineStream()->WaitFor(std::exchange(passed, Event()));
}

void RouterStats::Fill(const RouterMeasures& measures, absl::Span<const int64_t> count) {
  aux_loss = measures.aux_loss;
  z_loss = measures.z_loss;
  entropy_sum = measures.entropy_sum;
  expert_count.assign(count.begin(), count.end());
  dropped_slots = measures.dropped_slots;
  status_ = measures.bad_logit == 0 ? absl::OkStatus()
                                    : LogitNotFinite(kFirstLogit - measures.bad_logit, place_);
}

absl::Status RouterStats::Take(const RouterMeasures* measures, absl::Span<const int64_t> count,
                               const LogitPlace& place, Stream& stream) {
  place_ = place;
  if (!IsCuda(stream)) {
    MOE_RETURN_IF_ERROR(stream.Synchronize());
    Fill(*measures, count);
    return absl::OkStatus();
  }
  constexpr auto kBytes = static_cast<int64_t>(sizeof(RouterMeasures));
  const auto count_bytes = static_cast<int64_t>(count.size() * sizeof(int64_t));
  if (arrival_ == nullptr || arrival_->memory.bytes() != kBytes + count_bytes) {
    arrival_ = std::make_unique<Arrival>();
    MOE_ASSIGN_OR_RETURN(MemoryResource* const pinned, PinnedMemory());
    MOE_ASSIGN_OR_RETURN(arrival_->memory,
                         Buffer::Allocate(kBytes + count_bytes, *pinned, "RouterStats"));
  }
  MOE_RETURN_IF_ERROR(arrival_->Wait());
  std::byte* const to = arrival_->memory.data();
  MOE_RETURN_IF_ERROR(stream.CopyBytes(measures, to, kBytes));
  MOE_RETURN_IF_ERROR(stream.CopyBytes(count.data(), to + kBytes, count_bytes));
  MOE_ASSIGN_OR_RETURN(arrival_->passed, stream.Record());
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  aux_loss = z_loss = entropy_sum = kNaN;
  expert_count.assign(count.size(), -1);
  dropped_slots = -1;
  return absl::OkStatus();
}

absl::Status RouterStats::Wait() {
  if (arrival_ == nullptr || arrival_->passed.state() == nullptr) return status_;
  status_ = arrival_->Wait();
  if (!status_.ok()) return status_;
  const auto* const measures = reinterpret_cast<const RouterMeasures*>(arrival_->memory.data());
  Fill(*measures, {reinterpret_cast<const int64_t*>(measures + 1), expert_count.size()});
  return status_;
}

}  // namespace moe
