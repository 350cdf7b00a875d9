#include "comm/ring_all_reduce.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

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

// The elements of block b when n are cut over `ranks`: differ by at most one.
struct Range {
  int64_t begin, end;
  int64_t size() const { return end - begin; }
};
Range Block(int64_t n, int b, int ranks) {
  return {n / ranks * b + std::min<int64_t>(n % ranks, b),
          n / ranks * (b + 1) + std::min<int64_t>(n % ranks, b + 1)};
}
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

RingAllReduce::~RingAllReduce() {
  if (scratch_used_.state() != nullptr) waits_->WaitFor(scratch_used_).IgnoreError();
}

absl::Status RingAllReduce::Sum(absl::Span<float> inout, Stream& stream) {
  return SumWhereItCan(inout, stream);
}
absl::Status RingAllReduce::Sum(absl::Span<int64_t> inout, Stream& stream) {
  return SumWhereItCan(inout, stream);
}

template <typename T>
absl::Status RingAllReduce::SumWhereItCan(absl::Span<T> inout, Stream& stream) {
  if (comm_.size() == 1 || inout.empty()) return absl::OkStatus();
  const auto sum = [&](absl::Span<const std::byte>, absl::Span<std::byte> bytes,
                       Stream& where) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const absl::Span<T> scratch, Scratch<T>(where));
    auto* const values = reinterpret_cast<T*>(bytes.data());
    absl::Status status = Circle(absl::MakeSpan(values, inout.size()), scratch, where);
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
absl::Status RingAllReduce::Circle(absl::Span<T> inout, absl::Span<T> scratch, Stream& stream) {
  const int ranks = comm_.size();
  const int rank = comm_.rank();
  const auto n = static_cast<int64_t>(inout.size());
  const auto chunk = static_cast<int64_t>(scratch.size());
  const int64_t chunks = (Block(n, 0, ranks).size() + chunk - 1) / chunk;  // block 0 is a longest
  const int next = Mod(rank + 1, ranks);
  const int previous = Mod(rank - 1, ranks);

  for (int step = 0; step < ranks - 1; ++step) {  // reduce-scatter
    const Range out = Block(n, Mod(rank - 1 - step, ranks), ranks);
    const Range in = Block(n, Mod(rank - 2 - step, ranks), ranks);
    for (int64_t c = 0; c < chunks; ++c) {
      const Range send = Chunk(out, c, chunk);
      const Range recv = Chunk(in, c, chunk);
      const absl::Span<T> received = scratch.first(static_cast<size_t>(recv.size()));
      MOE_RETURN_IF_ERROR(
          comm_.SendRecv({SendTo(next, Of(inout, send)), ReceiveFrom(previous, received)}, stream));
      MOE_RETURN_IF_ERROR(AddPartial<T>(received, Of(inout, recv), stream));
    }
  }
  for (int step = 0; step < ranks - 1; ++step) {  // all-gather
    const Range out = Block(n, Mod(rank - step, ranks), ranks);
    const Range in = Block(n, Mod(rank - 1 - step, ranks), ranks);
    MOE_RETURN_IF_ERROR(comm_.SendRecv(
        {SendTo(next, Of(inout, out)), ReceiveFrom(previous, Of(inout, in))}, stream));
  }
  return absl::OkStatus();
}

}  // namespace moe
