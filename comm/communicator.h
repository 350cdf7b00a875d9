// Collective communication among the ranks of one group.
#ifndef MOE_COMM_COMMUNICATOR_H_
#define MOE_COMM_COMMUNICATOR_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include <absl/container/inlined_vector.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/host_staging.h"
#include "comm/site.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/stream.h"

namespace moe {

class RankWatch;    // comm/watch/rank_watch.h
struct FlightCall;  // comm/watch/flight_recorder.h

enum class ReduceOp : uint8_t { kSum, kMax };

// Memory that every rank of a group can read in place. The owner writes `local()`; peers read
// through `peer(r)`, on the device that holds the memory. Communicator::Fence orders these
// accesses.
class PeerBuffer {
 public:
  virtual ~PeerBuffer() = default;
  virtual absl::Span<std::byte> local() const = 0;  // [bytes], zeroed, 64-byte aligned
  // The buffer of rank r, readable from this rank. peer(own rank) is local().
  virtual const std::byte* peer(int r) const = 0;
};

// One step of a group of point-to-point transfers.
struct SendRecvOp {
  int peer = 0;
  const void* send = nullptr;  // nullptr: this op receives
  void* recv = nullptr;        // nullptr: this op sends
  int64_t bytes = 0;
};
// A group of up to four, such as a ring step's send and receive, takes nothing from the heap.
using SendRecvOps = absl::InlinedVector<SendRecvOp, 4>;

enum class CollectiveKind : uint8_t {
  kAllReduce,
  kReduceScatter,
  kReduceScatterV,
  kAllGather,
  kAllGatherV,
  kAllToAll,  // becomes an AllToAllV of equal parts
  kAllToAllV,
  kBroadcast
};
const char* NameOf(CollectiveKind kind);  // "AllReduce"

// An entry a rank; up to 16 take nothing from the heap.
using RankCounts = absl::InlinedVector<int64_t, 16>;

// The arguments of one collective, whatever its type.
struct CollectiveCall {
  CollectiveKind kind = CollectiveKind::kAllReduce;
  DType type = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;  // reductions only
  int root = 0;                  // Broadcast only
  absl::Span<const std::byte> send;
  absl::Span<std::byte> recv;  // AllReduce, Broadcast: also the memory that is sent
  // Elements to and from each rank, for calls whose `send` or `recv` has a part for each rank;
  // bytes in DoCollective.
  RankCounts send_counts, recv_counts;
  Site site;

  bool scatters() const {
    return kind == CollectiveKind::kReduceScatter || kind == CollectiveKind::kReduceScatterV;
  }
  bool gathers() const {
    return kind == CollectiveKind::kAllGather || kind == CollectiveKind::kAllGatherV;
  }
  bool reduces() const { return kind == CollectiveKind::kAllReduce || scatters(); }
  // Elements of what must be as large on all ranks: the buffer, or one rank's part of it; 0:
  // AllToAllV.
  int64_t count() const;
};

// One rank's end of a group of size() ranks, numbered 0 .. size()-1.
//
// Collectives must be called by every rank of the group, in the same order, with arguments that
// agree. They are enqueued on `stream` and return at once; buffers belong to the operation until
// the stream passes it. A CPU stream may run them before returning.
//
// Every backend accepts streams of the CPU, over memory of the host, and streams of a CUDA device,
// over memory of that device. A backend that moves host memory only waits for a CUDA stream, copies
// what is sent to the host, and what was received back to the device: the call then blocks the
// host, and ranks that enqueue collectives must do so in one order, as they must anyway.
//
// Deadlines. timeout() bounds silence, not an operation: it is the longest that a wait may last
// without progress. A peer that arrives, a transfer or a part of one (16 MiB) that ends is
// progress, so that a large exchange over a slow link takes as long as it takes. A process that
// stood still (Ctrl-Z, a paused machine) starts its deadlines again. NCCL does not report progress:
// there the deadline bounds an operation, from the moment its stream reached it.
//
// Thread use: one host thread and one stream at a time. For collectives that overlap each other,
// Split() a second communicator.
//
// Errors. Bad arguments: kInvalidArgument at once, before anything is sent, the same on every
// backend; the communicator stays usable. A lost peer, Abort() or a timeout: kAborted, kUnavailable
// or kDeadlineExceeded, from this or a later call or from Stream::Synchronize(); the communicator
// is then dead and every later call returns the same status. Messages name the rank, the site
// passed to the call, the ranks that were waited for and how long. Barrier and Split belong to no
// step and take no site.
//
// Backends override the Do* functions only; checks live here so that all backends agree. All calls
// pass the RankWatch of the rank, if it has one.
class Communicator {
 public:
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual absl::string_view backend() const = 0;  // "local", "mpi", "nccl"
  virtual absl::Duration timeout() const = 0;     // bound of every wait, without progress
  // NCCL: the device of this rank, the only one whose streams it accepts beside the CPU's. nullopt:
  // streams of any device are accepted.
  virtual std::optional<Device> device() const { return std::nullopt; }

  // NCCL: the most blocks of the kernel that a collective in a CUDA stream is; each needs a
  // multiprocessor for itself. 0: a collective is no kernel, or this rank is alone.
  virtual int kernel_blocks() const { return 0; }

  // inout[i] on every rank becomes op over ranks of inout[i]. Wire cost per rank: 2*S*(R-1)/R bytes
  // for S = bytes of `inout`, R = size(). Same result, bit for bit, on every rank, and from run to
  // run. T: float, double, BFloat16 and Float16 (summed in float32), int32_t, int64_t. This is the
  // backend's own algorithm (local: peers' buffers are read in place, summed in rank order);
  // RingAllReduce (comm/ring_all_reduce.h) is ours over SendRecv.
  template <typename T>
  absl::Status AllReduce(absl::Span<T> inout, ReduceOp op, Stream& stream, const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kAllReduce,
                    .type = DTypeOf<T>::value,
                    .op = op,
                    .send = BytesOf(inout),
                    .recv = BytesOf(inout),
                    .site = site},
                   stream);
  }

  // `send` is R equal blocks; this rank receives the sum (or max) over ranks of block rank().
  // recv.size() * R == send.size(); recv may be block rank() of send, else they must not overlap.
  template <typename T>
  absl::Status ReduceScatter(absl::Span<const T> send, absl::Span<T> recv, ReduceOp op,
                             Stream& stream, const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kReduceScatter,
                    .type = DTypeOf<T>::value,
                    .op = op,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .site = site},
                   stream);
  }

  // ReduceScatter of parts of any size: `send` is a part for each rank, one behind the other; this
  // rank receives the sum (or max) over ranks of part rank().
  //   counts  [R] elements of each part, >= 0, with sum send.size() (host memory); the same on all
  //   recv    [counts[rank()]]; may be part rank() of send, else they must not overlap
  template <typename T>
  absl::Status ReduceScatterV(absl::Span<const T> send, absl::Span<const int64_t> counts,
                              absl::Span<T> recv, ReduceOp op, Stream& stream,
                              const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kReduceScatterV,
                    .type = DTypeOf<T>::value,
                    .op = op,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .send_counts = Counts(counts),
                    .site = site},
                   stream);
  }

  // recv[r * n .. (r + 1) * n) = `send` of rank r; n = send.size(), the same on all ranks. send may
  // be block rank() of recv, else they must not overlap.
  template <typename T>
  absl::Status AllGather(absl::Span<const T> send, absl::Span<T> recv, Stream& stream,
                         const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kAllGather,
                    .type = DTypeOf<T>::value,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .site = site},
                   stream);
  }

  // AllGather of parts of any size: part r of `recv` becomes `send` of rank r.
  //   send    [counts[rank()]]; may be part rank() of recv, else they must not overlap
  //   counts  [R] elements of each part, >= 0, with sum recv.size() (host memory); the same on all
  template <typename T>
  absl::Status AllGatherV(absl::Span<const T> send, absl::Span<T> recv,
                          absl::Span<const int64_t> counts, Stream& stream, const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kAllGatherV,
                    .type = DTypeOf<T>::value,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .recv_counts = Counts(counts),
                    .site = site},
                   stream);
  }

  // Equal blocks: rank r receives block r of every rank, in rank order.
  template <typename T>
  absl::Status AllToAll(absl::Span<const T> send, absl::Span<T> recv, Stream& stream,
                        const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kAllToAll,
                    .type = DTypeOf<T>::value,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .site = site},
                   stream);
  }

  // Rank r receives send[r] of every rank, in rank order.
  //   send         elements grouped by destination, sum(send_counts) of them
  //   send_counts  [R] elements to each rank, >= 0 (host memory)
  //   recv         elements grouped by source, sum(recv_counts) of them
  //   recv_counts  [R] elements from each rank, >= 0 (host memory); must equal what peers send
  template <typename T>
  absl::Status AllToAllV(absl::Span<const T> send, absl::Span<const int64_t> send_counts,
                         absl::Span<T> recv, absl::Span<const int64_t> recv_counts, Stream& stream,
                         const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kAllToAllV,
                    .type = DTypeOf<T>::value,
                    .send = BytesOf(send),
                    .recv = BytesOf(recv),
                    .send_counts = Counts(send_counts),
                    .recv_counts = Counts(recv_counts),
                    .site = site},
                   stream);
  }

  // Every rank's `inout` becomes root's.
  template <typename T>
  absl::Status Broadcast(absl::Span<T> inout, int root, Stream& stream, const Site& site = {}) {
    return Collect({.kind = CollectiveKind::kBroadcast,
                    .type = DTypeOf<T>::value,
                    .root = root,
                    .send = BytesOf(inout),
                    .recv = BytesOf(inout),
                    .site = site},
                   stream);
  }

  // Any of these collectives, for callers that learn the type at run time.
  absl::Status Collect(CollectiveCall call, Stream& stream);

  // A group of sends and receives that progress together; done when all are. Between two ranks,
  // the i-th send meets the i-th receive, and their sizes must agree; ops of 0 bytes are skipped on
  // both sides. Not every rank need call it: only those with something to move (ranks that wait for
  // an absent peer time out).
  absl::Status SendRecv(absl::Span<const SendRecvOp> ops, Stream& stream, const Site& site = {});

  // Blocks the host until every rank has called it.
  absl::Status Barrier();

  // Stream-ordered barrier: work after it in `stream` sees everything that any rank put into its
  // peer buffers before its own Fence. Publishing and releasing peer memory are Fences.
  absl::Status Fence(Stream& stream, const Site& site = {});

  // Collective, blocks the host. Ranks with equal `color` >= 0 form a group, ordered by (key,
  // rank); color -1 returns nullptr. The new communicator shares nothing with this one but its
  // fate: when one of them dies by Abort or timeout, so do the others of the same world on this
  // rank.
  absl::StatusOr<std::unique_ptr<Communicator>> Split(int color, int key);

  // Rank r of this group, as a rank of the world.
  virtual int world_rank(int r) const { return r; }

  // From now on collectives of this rank, and of groups split off later, pass `watch`. The group's
  // name in the flight recorder must be the same on all ranks. Before other threads use it.
  void Attach(std::shared_ptr<RankWatch> watch, std::string group);
  // What `Attach` was given; nullptr without.
  RankWatch* watch() const { return watch_.get(); }
  // The rank comes to a place outside communication. With a watch: RankWatch::Mark.
  void Mark(const Site& site) const {
    if (watch_ != nullptr) MarkWatched(site);
  }

  // Whether collectives move memory of devices of this kind themselves, in their streams, and not
  // by way of the host. All move the host's.
  virtual bool moves(DeviceKind kind) const { return kind == DeviceKind::kCpu; }

  // Whether AllocatePeerBuffer may work here, for memory of devices of this kind.
  virtual bool has_peer_memory(DeviceKind /*kind*/) const { return false; }

  // Collective, blocks the host; `bytes` may differ between ranks. On all ranks alike
  // kUnimplemented without peer memory, or where one device cannot read the memory of another.
  absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocatePeerBuffer(
      int64_t bytes, MemoryResource& memory = CpuMemory(), const Site& site = {});

  // Ends this rank's part: its pending and later calls return kAborted. Peers are notified at once
  // where the backend can do so (local), else they fail at their timeout. Callable from any thread.
  virtual void Abort(absl::Status reason) = 0;

  // Bytes for other ranks, of calls that have a part for each rank, so far.
  int64_t bytes_sent() const { return bytes_sent_; }

  // Nanoseconds that this rank has spent in collectives between its own last received byte and that
  // of its peers. 0 with NCCL, which does not report it. To be called by the thread that runs the
  // collectives.
  virtual int64_t lingered_ns() const { return 0; }

 protected:
  Communicator() = default;
  // A call whose arguments fit; but for reductions it moves bytes: `type` is kUInt8.
  virtual absl::Status DoCollective(CollectiveCall call, Stream& stream) = 0;
  virtual absl::Status DoSendRecv(SendRecvOps ops, Stream& stream, const Site& site) = 0;
  virtual absl::Status DoFence(Stream& stream, const Site& site) = 0;
  virtual absl::Status DoBarrier() = 0;
  virtual absl::StatusOr<std::unique_ptr<Communicator>> DoSplit(int color, int key) = 0;
  // Without peer memory: kUnimplemented.
  virtual absl::StatusOr<std::shared_ptr<PeerBuffer>> DoAllocatePeerBuffer(int64_t bytes,
                                                                           MemoryResource& memory,
                                                                           const Site& site);

 private:
  template <typename T>
  static absl::Span<const std::byte> BytesOf(absl::Span<const T> span) {
    return {reinterpret_cast<const std::byte*>(span.data()), span.size() * sizeof(T)};
  }
  template <typename T>
  static absl::Span<std::byte> BytesOf(absl::Span<T> span) {
    return {reinterpret_cast<std::byte*>(span.data()), span.size() * sizeof(T)};
  }
  static RankCounts Counts(absl::Span<const int64_t> counts) {
    return {counts.begin(), counts.end()};
  }
  // kInvalidArgument unless the arguments fit each other and the group.
  absl::Status Check(CollectiveCall& call) const;
  absl::Status StagedSendRecv(SendRecvOps ops, Stream& stream, const Site& site);

  // enqueue(), which hands `call` to `stream`, or with nullptr completes it, with its entry in the
  // flight recorder. Calls in a CUDA stream remain "entered" there.
  template <typename Enqueue>
  absl::Status Watched(const FlightCall& call, Stream* stream, int64_t& sequence, Enqueue enqueue);
  void MarkWatched(const Site& site) const;

  HostStaging staging_;
  int64_t bytes_sent_ = 0;
  std::shared_ptr<RankWatch>
      watch_;             // nullptr: none. Shared with the rank's other groups and tasks
  std::string group_;     // name in the flight recorder
  int group_number_ = 0;  // there
  // Calls so far. Not every rank takes part in a SendRecv: these have numbers of their own.
  int64_t collectives_ = 0, transfers_ = 0, splits_ = 0;
};

}  // namespace moe

#endif  // MOE_COMM_COMMUNICATOR_H_
