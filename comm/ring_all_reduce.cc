#include "comm/ring_all_reduce.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include <absl/container/inlined_vector.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"
#include "kernels/elementwise/elementwise.h"

namespace moe {

namespace {

constexpr int64_t kCacheLine = 64;  // bytes

int64_t ChunkBytes(const RingOptions& options, DeviceKind kind) {
  if (options.chunk_bytes == 0) return int64_t{1} << (kind == DeviceKind::kCuda ? 22 : 18);
  return std::max(options.chunk_bytes, kCacheLine) / kCacheLine * kCacheLine;
}

int Mod(int a, int n) {
  return (a % n + n) % n;
}

struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
Range Chunk(const Range& block, int64_t c, int64_t chunk) {
  return {std::min(block.end, block.begin + c * chunk),
          std::min(block.end, block.begin + (c + 1) * chunk)};
}

template <typename T>
absl::Span<T> Of(absl::Span<T> values, const Range& range) {
  return values.subspan(static_cast<size_t>(range.begin), static_cast<size_t>(range.size()));
}

template <typename T>
SendRecvOp SendTo(int peer, absl::Span<T> values) {
  return {.peer = peer,
          .send = values.data(),
          .bytes = static_cast<int64_t>(values.size() * sizeof(T))};
}
template <typename T>
SendRecvOp ReceiveFrom(int peer, absl::Span<T> values) {
  return {.peer = peer,
          .recv = values.data(),
          .bytes = static_cast<int64_t>(values.size() * sizeof(T))};
}

}  // namespace

// The elements of each rank's block, one behind the other.
class RingAllReduce::Cut {
 public:
  explicit Cut(absl::Span<const int64_t> counts) {
    for (const int64_t count : counts) {
      begin_.push_back(begin_.back() + count);
      longest_ = std::max(longest_, count);
    }
  }
  // Blocks of n elements that differ by at most one.
  Cut(int64_t n, int ranks) : longest_((n + ranks - 1) / ranks) {
    for (int64_t b = 1; b <= ranks; ++b) {
      begin_.push_back(n / ranks * b + std::min<int64_t>(n % ranks, b));
    }
  }
  // b modulo the number of ranks.
  Range block(int b) const {
    const auto at = static_cast<size_t>(Mod(b, static_cast<int>(begin_.size()) - 1));
    return {begin_[at], begin_[at + 1]};
  }
  int64_t longest() const { return longest_; }

 private:
  absl::InlinedVector<int64_t, 17> begin_ = {0};
  int64_t longest_ = 0;
};

RingAllReduce::~RingAllReduce() {
  if (scratch_used_.state() != nullptr) waits_->WaitFor(scratch_used_).IgnoreError();
}

template <typename T>
absl::Status RingAllReduce::Sum(absl::Span<T> inout, Stream& stream, const Site& site) {
  const Cut cut(static_cast<int64_t>(inout.size()), comm_.size());
  return RunWhereItCan(inout, stream, site, [&](const Lent<T>& lent) {
    MOE_RETURN_IF_ERROR(Scatter(lent, cut));
    return Gather(lent, cut);
  });
}

template <typename T>
absl::Status RingAllReduce::ReduceScatter(absl::Span<T> inout, absl::Span<const int64_t> counts,
                                          Stream& stream, const Site& site) {
  const auto n = static_cast<int64_t>(inout.size());
  if (static_cast<int>(counts.size()) != comm_.size() ||
      std::any_of(counts.begin(), counts.end(), [n](int64_t c) { return c < 0 || c > n; }) ||
      std::accumulate(counts.begin(), counts.end(), int64_t{0}) != n) {
    return absl::InvalidArgumentError(absl::StrCat("RingAllReduce: counts = [",
                                                   absl::StrJoin(counts, ", "), "], expected ",
                                                   comm_.size(), " counts >= 0 with sum ", n));
  }
  const Cut cut(counts);
  return RunWhereItCan(inout, stream, site,
                       [&](const Lent<T>& lent) { return Scatter(lent, cut); });
}

template <typename T, typename Circle>
absl::Status RingAllReduce::RunWhereItCan(absl::Span<T> inout, Stream& stream, const Site& site,
                                          Circle circle) {
  if (comm_.size() == 1 || inout.empty()) return absl::OkStatus();
  const auto sum = [&](absl::Span<const std::byte>, absl::Span<std::byte> bytes,
                       Stream& where) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const absl::Span<T> scratch, Scratch<T>(where));
    auto* const values = reinterpret_cast<T*>(bytes.data());
    absl::Status status = circle(Lent<T>{{values, inout.size()}, scratch, where, site});
    absl::StatusOr<Event> used = where.Record();  // a ring that broke has used it, too
    status.Update(used.status());
    if (used.ok()) scratch_used_ = *std::move(used);
    return status;
  };
  const auto all =
      absl::MakeSpan(reinterpret_cast<std::byte*>(inout.data()), inout.size() * sizeof(T));
  if (comm_.moves(stream.device().kind)) return sum(all, all, stream);
  return staging_.Run(all, all, stream, sum);
}

template <typename T>
absl::StatusOr<absl::Span<T>> RingAllReduce::Scratch(Stream& stream) {
  const Device device = stream.device();
  if (scratch_.bytes() == 0) {
    MemoryResource* memory = &CpuMemory();
    if (IsCuda(stream)) {
      MOE_ASSIGN_OR_RETURN(memory, CudaMemory(device.index));
    }
    MOE_ASSIGN_OR_RETURN(
        scratch_, Buffer::Allocate(ChunkBytes(options_, device.kind), *memory, "ring all-reduce"));
    device_ = device;
  }
  if (device.kind != device_.kind || device.index != device_.index) {
    return absl::InvalidArgumentError("RingAllReduce: streams of two devices, expected one device");
  }
  if (scratch_used_.state() != nullptr) MOE_RETURN_IF_ERROR(stream.WaitFor(scratch_used_));
  return scratch_.span<T>();
}

template <typename T>
absl::Status RingAllReduce::Scatter(const Lent<T>& lent, const Cut& cut) {
  const auto& [inout, scratch, stream, site] = lent;
  const int ranks = comm_.size(), rank = comm_.rank();
  const auto chunk = static_cast<int64_t>(scratch.size());
  const int64_t chunks = (cut.longest() + chunk - 1) / chunk;
  for (int step = 0; step < ranks - 1; ++step) {
    const Range out = cut.block(rank - 1 - step);
    const Range in = cut.block(rank - 2 - step);
    for (int64_t c = 0; c < chunks; ++c) {
      const Range send = Chunk(out, c, chunk);
      const Range recv = Chunk(in, c, chunk);
      const absl::Span<T> received = scratch.first(static_cast<size_t>(recv.size()));
      MOE_RETURN_IF_ERROR(comm_.SendRecv({SendTo(Mod(rank + 1, ranks), Of(inout, send)),
                                          ReceiveFrom(Mod(rank - 1, ranks), received)},
                                         stream, site));
      MOE_RETURN_IF_ERROR(AddPartial<T>(received, Of(inout, recv), stream));
    }
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status RingAllReduce::Gather(const Lent<T>& lent, const Cut& cut) {
  const auto& [inout, scratch, stream, site] = lent;
  const int ranks = comm_.size(), rank = comm_.rank();
  for (int step = 0; step < ranks - 1; ++step) {
    MOE_RETURN_IF_ERROR(
        comm_.SendRecv({SendTo(Mod(rank + 1, ranks), Of(inout, cut.block(rank - step))),
                        ReceiveFrom(Mod(rank - 1, ranks), Of(inout, cut.block(rank - 1 - step)))},
                       stream, site));
  }
  return absl::OkStatus();
}

template absl::Status RingAllReduce::Sum(absl::Span<float>, Stream&, const Site&);
template absl::Status RingAllReduce::Sum(absl::Span<int64_t>, Stream&, const Site&);
template absl::Status RingAllReduce::ReduceScatter(absl::Span<float>, absl::Span<const int64_t>,
                                                   Stream&, const Site&);
template absl::Status RingAllReduce::ReduceScatter(absl::Span<int64_t>, absl::Span<const int64_t>,
                                                   Stream&, const Site&);

}  // namespace moe
