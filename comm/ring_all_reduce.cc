#include "comm/ring_all_reduce.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/host_staging.h"
#include "comm/reduce.h"
#include "kernels/base/buffer.h"
#include "kernels/base/status_macros.h"

namespace moe {

struct RingAllReduce::State {
  State(Communicator& over, const RingOptions& options)
      : comm(over), chunk_bytes(std::max<int64_t>(options.chunk_bytes, 64) / 64 * 64) {}

  Communicator& comm;
  const int64_t chunk_bytes;
  Buffer scratch;       // one chunk; the stream's order says who uses it
  HostStaging staging;  // streams of a CUDA device
};

namespace {

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
SendRecvOp SendTo(int peer, const T* data, int64_t n) {
  return {.peer = peer, .send = data, .bytes = n * static_cast<int64_t>(sizeof(T))};
}
template <typename T>
SendRecvOp ReceiveFrom(int peer, T* data, int64_t n) {
  return {.peer = peer, .recv = data, .bytes = n * static_cast<int64_t>(sizeof(T))};
}

template <typename T, typename State>
absl::Status RingSum(const std::shared_ptr<State>& state, absl::Span<T> inout, Stream& stream) {
  Communicator& comm = state->comm;
  const int ranks = comm.size();
  const int rank = comm.rank();
  if (ranks == 1 || inout.empty()) return absl::OkStatus();
  if (stream.device().kind != DeviceKind::kCpu) {
    const int64_t bytes = static_cast<int64_t>(inout.size() * sizeof(T));
    return state->staging.Run(
        {inout.data(), bytes, inout.data(), bytes}, stream,
        [&](const void*, void* host, Stream& where) {
          return RingSum<T>(state, {static_cast<T*>(host), inout.size()}, where);
        });
  }
  if (state->scratch.bytes() == 0) {
    MOE_ASSIGN_OR_RETURN(state->scratch, Buffer::Allocate(state->chunk_bytes));
  }
  const auto n = static_cast<int64_t>(inout.size());
  const int64_t chunk = state->chunk_bytes / static_cast<int64_t>(sizeof(T));
  const int64_t chunks = (Block(n, 0, ranks).size() + chunk - 1) / chunk;  // block 0 is a longest
  const int next = Mod(rank + 1, ranks);
  const int previous = Mod(rank - 1, ranks);
  T* const scratch = state->scratch.template span<T>().data();

  for (int step = 0; step < ranks - 1; ++step) {  // reduce-scatter
    const Range out = Block(n, Mod(rank - 1 - step, ranks), ranks);
    const Range in = Block(n, Mod(rank - 2 - step, ranks), ranks);
    for (int64_t c = 0; c < chunks; ++c) {
      const Range send = Chunk(out, c, chunk);
      const Range recv = Chunk(in, c, chunk);
      MOE_RETURN_IF_ERROR(comm.SendRecv({SendTo(next, inout.data() + send.begin, send.size()),
                                         ReceiveFrom(previous, scratch, recv.size())},
                                        stream));
      MOE_RETURN_IF_ERROR(
          stream.Enqueue([state, scratch, acc = inout.data() + recv.begin, count = recv.size()] {
            AddPartial(acc, scratch, count);
            return absl::OkStatus();
          }));
    }
  }
  for (int step = 0; step < ranks - 1; ++step) {  // all-gather
    const Range out = Block(n, Mod(rank - step, ranks), ranks);
    const Range in = Block(n, Mod(rank - 1 - step, ranks), ranks);
    MOE_RETURN_IF_ERROR(comm.SendRecv({SendTo(next, inout.data() + out.begin, out.size()),
                                       ReceiveFrom(previous, inout.data() + in.begin, in.size())},
                                      stream));
  }
  return absl::OkStatus();
}

}  // namespace

RingAllReduce::RingAllReduce(Communicator& comm, const RingOptions& options)
    : state_(std::make_shared<State>(comm, options)) {}
RingAllReduce::~RingAllReduce() = default;

absl::Status RingAllReduce::Sum(absl::Span<float> inout, Stream& stream) {
  return RingSum(state_, inout, stream);
}
absl::Status RingAllReduce::Sum(absl::Span<int64_t> inout, Stream& stream) {
  return RingSum(state_, inout, stream);
}

}  // namespace moe
