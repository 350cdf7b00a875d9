// State that the ranks of one fake NCCL communicator share. Internal to fake_nccl*.cc. Guarded by
// one lock, which may be taken while the streams' lock is held, but not the other way round.
#ifndef MOE_TESTS_CUSIM_FAKE_NCCL_WORLD_H_
#define MOE_TESTS_CUSIM_FAKE_NCCL_WORLD_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/cusim/fake_nccl.h"
#include "tests/cusim/fake_streams.h"

namespace cusim {

struct NcclWorld;

// One call of one rank: a collective, or one side of a transfer.
struct NcclCallRecord {
  enum class Kind : uint8_t {
    kAllReduce,
    kReduce,
    kReduceScatter,
    kAllGather,
    kBroadcast,
    kSend,
    kRecv,
    kSplit
  };
  Kind kind;
  ncclComm* comm = nullptr;
  const char* send = nullptr;
  char* recv = nullptr;
  size_t send_bytes = 0, recv_bytes = 0;
  size_t count = 0;  // elements, as given
  ncclDataType_t type = ncclUint8;
  ncclRedOp_t op = ncclSum;
  int peer = 0;          // or root
  int64_t sequence = 0;  // number among the collectives and splits
  std::string sent;      // contents of the send buffer when the kernel began
  bool clears = false;   // the receive buffer became NaN when the kernel began
  bool done = false;

  bool IsTransfer() const { return kind == Kind::kSend || kind == Kind::kRecv; }
  const char* name() const;
  std::string Text() const;
  bool Matches(const NcclCallRecord& other) const;
};
using NcclCallPointer = std::shared_ptr<NcclCallRecord>;

size_t NcclSizeOf(ncclDataType_t type);

struct NcclSplit {
  std::map<int, std::pair<int, int>> wishes;       // rank -> (color, key)
  std::map<int, std::shared_ptr<NcclWorld>> made;  // color -> its world
};

struct NcclWorld {
  int size = 0;
  std::vector<ncclComm*> ranks;                           // [size]; nullptr: has not joined
  std::map<int64_t, NcclCallPointer> first;               // by sequence: the first rank's call
  std::map<int64_t, std::vector<NcclCallPointer>> begun;  // by sequence, [size]
  std::map<std::pair<int, int>, std::deque<NcclCallPointer>> sends, receives;  // (from, to), begun
  std::map<int64_t, NcclSplit> splits;

  bool complete() const;
  // Called when a kernel of a rank reaches this call: moves what can be moved.
  void Begin(const NcclCallPointer& call);
  void MoveTransfers(std::pair<int, int> way);
  void MoveCollective(int64_t sequence);
};

// The one lock, injected faults, and random choices.
struct NcclGlobals {
  std::mutex mu;
  NcclFaults faults;
  std::mt19937 random{1};
  std::map<std::string, std::shared_ptr<NcclWorld>> worlds;  // by id
  std::vector<ncclComm*> communicators;                      // all that ever existed
  int64_t next_id = 1;
  int64_t calls_from_other_devices = 0;
  int hanging_aborts = 0;

  static NcclGlobals& Get();
};

[[noreturn]] void NcclMisuse(const char* function, const std::string& rule);

// A kernel: everything that one group of calls does on one communicator.
class NcclKernel final : public External {
 public:
  NcclKernel(ncclComm* comm, std::vector<NcclCallPointer> calls);
  // Called before it enters its stream. A kernel that an abort keeps from it is not waited for.
  void EnterStream();
  GridBlocks blocks() const override;
  bool Ready() override;
  bool Step() override;

 private:
  void Begin();

  ncclComm* const comm_;
  int64_t number_ = 0;  // among the communicator's kernels
  const std::vector<NcclCallPointer> calls_;
  bool begun_ = false;
};

}  // namespace cusim

struct ncclComm {
  enum class Life : uint8_t { kAlive, kFinalized, kDestroyed, kAborted };
  std::shared_ptr<cusim::NcclWorld> world;
  int rank = 0;
  int root_rank = 0;  // rank in the world that was joined by id
  int device = 0;
  int kernel_blocks = 0;
  Life life = Life::kAlive;
  bool dead = false;  // its process has died: it begins nothing more
  ncclResult_t error = ncclSuccess;
  // The call in progress: every poll calls it to learn whether the call has ended.
  std::function<bool()> in_progress;
  std::atomic<int> inside{0};  // number of threads
  int64_t sequence = 0;
  int64_t kernels_made = 0, kernels_ended = 0;

  bool gone() const { return life == Life::kDestroyed || life == Life::kAborted; }
};

#endif  // MOE_TESTS_CUSIM_FAKE_NCCL_WORLD_H_
