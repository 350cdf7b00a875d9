// How the ranks (threads) of one process meet: shared by the local backend's communicators.
#ifndef MOE_COMM_LOCAL_LOCAL_GROUP_H_
#define MOE_COMM_LOCAL_LOCAL_GROUP_H_

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "comm/copy.h"
#include "comm/local/doorbell.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"

namespace moe {

// What all groups of one world share: whether it still lives. The first Kill wins.
class LocalFate {
 public:
  // Whoever waits for what may not come once the world has ended.
  class Waiter {
   public:
    virtual void WakeAll() = 0;  // called with the fate locked

   protected:
    ~Waiter() = default;
  };

  // Ends the world and wakes every waiter. The first reason of a rank is what its
  // own calls return from then on. Needs no memory to end it.
  void Kill(int world_rank, absl::Status reason) noexcept;
  bool dead() const { return dead_.load(std::memory_order_seq_cst); }
  // Why `world_rank`'s calls fail: the reason itself on the rank it comes from; elsewhere
  // kDeadlineExceeded stays what it is and all else becomes kAborted, naming that rank. The same
  // at every call. OK while the world lives. Without memory for its own words the reason's.
  absl::Status StatusOf(int world_rank) noexcept;
  // The rank that ended the world; -1 while it lives.
  int origin() const;

  // From Add to Remove a Kill wakes the waiter.
  void Add(Waiter* waiter);
  void Remove(Waiter* waiter);

 private:
  mutable std::mutex mu_;
  std::vector<Waiter*> waiters_;     // guarded by mu_
  absl::Status reason_;              // guarded by mu_
  int origin_ = -1;                  // guarded by mu_
  std::map<int, absl::Status> own_;  // guarded by mu_; what the calls of the other ranks return
  std::atomic<bool> dead_{false};
};

// The rank that waits, and its operation, for the message of a wait that fails.
struct LocalCaller {
  int rank = 0;
  const char* operation = "";
  Site site;
};

struct LocalPost;

// A rank's part of a collective, from what all ranks show.
using LocalWork = absl::FunctionRef<absl::Status(absl::Span<const LocalPost>)>;

// What a rank shows the others for the length of one collective. A cache line of its own: it is
// written while peers write theirs.
struct alignas(64) LocalPost {
  const char* operation = "";
  const std::byte* send = nullptr;
  std::byte* inout = nullptr;
  int64_t count = 0;
  DType type = DType::kUInt8;
  ReduceOp op = ReduceOp::kSum;
  int root = 0;
  absl::Span<const int64_t> send_bytes;  // AllToAllV: to each rank
  const LocalWork* work = nullptr;       // set by Collective
};

// One send of SendRecv, in a list by destination until the receiver has copied it.
struct LocalSend {
  const std::byte* data = nullptr;
  int64_t bytes = 0;
  LocalSend* next = nullptr;
};

class LocalGroup final : private LocalFate::Waiter {
 public:
  // `members[i]` is the world rank of rank i; `cores`: the cores that all ranks share.
  LocalGroup(std::shared_ptr<LocalFate> fate, std::vector<int> members, absl::Duration timeout,
             int cores = Cores());
  ~LocalGroup();
  LocalGroup(const LocalGroup&) = delete;
  LocalGroup& operator=(const LocalGroup&) = delete;

  int size() const { return static_cast<int>(members_.size()); }
  int world_rank(int rank) const { return members_[rank]; }
  absl::Duration timeout() const { return timeout_; }
  LocalFate& fate() const { return *fate_; }
  const std::shared_ptr<LocalFate>& shared_fate() const { return fate_; }

  // Collectives run in streams, Barrier and Split on host threads, possibly at the same time.
  // Each side meets on its own lane.
  enum Lane : uint8_t { kStreamLane, kHostLane };

  // Returns when every rank has called it on this lane, or with the reason the world died. The last
  // rank to arrive wakes `most` of the ranks that sleep.
  absl::Status Meet(Lane lane, const LocalCaller& caller, int most = INT_MAX);

  // One collective: shows `post` to all, runs `work` on everyone's posts when all are there, and
  // returns when everyone's has run, so that buffers may be reused. `work` failing ends the
  // world. Posts that disagree (see CheckSameCollective) fail before `work`.
  //
  // Where ranks outnumber the cores, the ranks that are awake run the work of those that sleep,
  // each of which then wakes up once a collective: `work` may run on another rank's thread.
  absl::Status Collective(const LocalCaller& caller, LocalPost post, LocalWork work);

  absl::Status SendRecv(const LocalCaller& caller, absl::Span<const SendRecvOp> ops);

  // Host lane: shows `value` to all ranks and passes the values of all to `work`; then waits for
  // all.
  absl::Status HostExchange(const LocalCaller& caller, void* value,
                            absl::FunctionRef<void(absl::Span<void* const>)> work);

  // Communicator::lingered_ns.
  int64_t lingered_ns(int rank) const { return ranks_[rank].lingered_ns; }

  void WakeAll() override;

  static int Cores();  // cores that this process may use, 1 at least

  // Rank `caller.rank` has done a part of what its peers wait for.
  void Progressed(const LocalCaller& caller) {
    ranks_[caller.rank].parts_done.fetch_add(1, std::memory_order_relaxed);
  }

 private:
  // Counter of one rank, on a cache line of its own, so that a meeting costs one transfer per peer.
  struct alignas(64) Counter {
    std::atomic<uint64_t> count{0};
  };
  struct Meeting {
    std::vector<Counter> arrivals;  // [R]; times the rank has met on the lane
    Doorbell bell;                  // rung by the last rank to arrive, for ranks that sleep
  };
  struct alignas(64) Mailbox {
    std::atomic<LocalSend*> first{nullptr};  // oldest send that was not yet taken
  };
  struct alignas(64) RankState {
    Doorbell bell;               // SendRecv: something came, or something of mine was taken
    std::atomic<int> inside{0};  // this rank's Inside objects
    std::atomic<uint64_t> parts_done{0};
    std::atomic<int> core{-1};  // where it last came to a meeting; its memory may be in cache there
    SpinBudget spin;            // SendRecv; this and the rest: used by this rank only
    SpinBudget meeting_spin[2];  // by lane
    int64_t lingered_ns = 0;
    uint64_t collectives = 0;
    std::vector<LocalSend> sends;   // storage of this rank's posts
    std::vector<LocalSend*> first;  // per peer
    std::vector<char> taken;        // per op: received, or nothing to receive
    std::vector<char> blocked;      // per peer
  };

  // Waits until every counter has come to `count`. A rank that finds them there wakes `most`
  // sleepers.
  absl::Status AwaitAll(Lane lane, const LocalCaller& caller, const std::vector<Counter>& counters,
                        uint64_t count, int most);
  static bool HaveAll(const std::vector<Counter>& counters, uint64_t count);
  absl::Status ForOthers(absl::FunctionRef<absl::Status(int)> run) const;
  // Runs the work of rank `owner` in collective `number`, unless somebody has begun it.
  absl::Status RunWork(int owner, uint64_t number);

  Mailbox& mailbox(int from, int to) { return mailboxes_[from * size() + to]; }

  // Blocks until done() or the world dies or the deadline passes (which ends the world) without
  // one of the missing, or this rank, having come or done a part of its work. done() may be called
  // any number of times, also after it was true; `early`, a cheap sign that it would be true, is
  // looked at beside the bell while this rank spins and falls asleep.
  absl::Status WaitUntil(Doorbell& bell, SpinBudget& spin, const LocalCaller& caller,
                         absl::FunctionRef<bool()> done, absl::FunctionRef<bool()> early,
                         absl::FunctionRef<bool(int)> is_missing);
  // Whether a missing rank was last seen on the core of `rank`: it does not run while that spins.
  bool SharesCore(int rank, absl::FunctionRef<bool(int)> is_missing) const;
  // What changes when a wait of `caller` progresses.
  struct Standing {
    int missing = 0;
    uint64_t parts_done = 0;  // by the missing and by the caller
    bool operator==(const Standing&) const = default;
  };
  Standing Look(const LocalCaller& caller, absl::FunctionRef<bool(int)> is_missing) const;
  absl::Status Late(const LocalCaller& caller, const std::vector<int>& missing,
                    absl::Duration waited);
  absl::Status Fail(const LocalCaller& caller, absl::Status reason);

  // While an Inside lives, its rank may touch the buffers of its peers, if status() is OK.
  class Inside {
   public:
    Inside(LocalGroup& group, const LocalCaller& caller);
    ~Inside() { inside_.fetch_sub(1, std::memory_order_seq_cst); }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;
    const absl::Status& status() const { return status_; }

   private:
    std::atomic<int>& inside_;
    absl::Status status_;
  };

  // A call that shows its peers the caller's memory. One that fails, by an exception too, ends the
  // world, and returns when no peer is inside, so that the memory may go.
  absl::Status Shown(const LocalCaller& caller, absl::FunctionRef<absl::Status()> call);

  void PostSends(const LocalCaller& caller, absl::Span<const SendRecvOp> ops);
  absl::Status TakeWhatCame(const LocalCaller& caller, absl::Span<const SendRecvOp> ops);

  const std::shared_ptr<LocalFate> fate_;
  const std::vector<int> members_;
  const absl::Duration timeout_;
  const int cores_;
  const bool may_spin_;  // ranks that outnumber the cores only keep their peers from running
  Meeting meetings_[2];  // by lane
  std::vector<LocalPost> posts_;   // entry r: written by rank r before a Meet, read after it
  std::vector<Counter> begun_;     // [R] last collective with the rank's work begun, by any rank
  std::vector<Counter> finished_;  // [R] last one in which it was finished
  std::vector<void*> host_posts_;  // as posts_, on the host lane
  std::vector<Mailbox> mailboxes_;
  std::vector<RankState> ranks_;
};

// work(begin, end) over [0, n), `part` at a time, each of which is progress of the caller's rank:
// what its peers see of it while they wait.
inline void InParts(LocalGroup& group, const LocalCaller& caller, int64_t n, int64_t part,
                    absl::FunctionRef<void(int64_t, int64_t)> work) {
  for (int64_t begin = 0; begin < n; begin += part) {
    work(begin, std::min(n, begin + part));
    group.Progressed(caller);
  }
}

// Bytes of a part. Even a disk that swaps copies them well within a deadline of a second.
inline constexpr int64_t kPartBytes = int64_t{16} << 20;

inline void CopyInParts(LocalGroup& group, const LocalCaller& caller, void* to, const void* from,
                        int64_t bytes, CopyHint hint = CopyHint::kCached) {
  InParts(group, caller, bytes, kPartBytes, [&](int64_t begin, int64_t end) {
    CopyBytes(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
              end - begin, hint);
  });
}

// Communicator::AllocatePeerBuffer: memory of the host, of one CUDA device, or of several each of
// which can read the others' (EnablePeerAccess). Else kUnimplemented on all ranks, naming the first
// pair that cannot.
absl::StatusOr<std::shared_ptr<PeerBuffer>> AllocateLocalPeerBuffer(LocalGroup& group,
                                                                    const LocalCaller& caller,
                                                                    int64_t bytes,
                                                                    MemoryResource& memory);

}  // namespace moe

#endif  // MOE_COMM_LOCAL_LOCAL_GROUP_H_
