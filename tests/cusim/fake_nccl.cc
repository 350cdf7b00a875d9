#include "tests/cusim/fake_nccl.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/cusim/fake_nccl_world.h"

namespace {

using cusim::NcclCallPointer;
using cusim::NcclCallRecord;
using cusim::NcclGlobals;
using cusim::NcclKernel;
using cusim::NcclMisuse;
using cusim::NcclSizeOf;
using cusim::NcclWorld;
using cusim::Streams;
using Kind = NcclCallRecord::Kind;
using Lock = std::lock_guard<std::mutex>;

constexpr int kMostPolls = 3;  // the most polls for which a call stays in progress

// Marks this thread as inside the communicator.
class Inside {
 public:
  Inside(const char* function, ncclComm_t comm, bool may_be_in_progress = false) : comm_(comm) {
    if (comm_ == nullptr) NcclMisuse(function, "the communicator is null");
    if (comm_->inside.fetch_add(1) != 0) {
      NcclMisuse(function, "two threads are inside one communicator");
    }
    int device = 0;
    (void)cudaGetDevice(&device);
    const Lock lock(NcclGlobals::Get().mu);
    if (device != comm_->device) ++NcclGlobals::Get().calls_from_other_devices;
    if (comm_->gone()) NcclMisuse(function, "the communicator was aborted or destroyed");
    if (may_be_in_progress) return;
    if (comm_->in_progress != nullptr) {
      NcclMisuse(function,
                 "the communicator's last call is in progress: poll ncclCommGetAsyncError");
    }
    if (comm_->life == ncclComm::Life::kFinalized) {
      NcclMisuse(function, "the communicator was finalized");
    }
  }
  ~Inside() { comm_->inside.fetch_sub(1); }
  Inside(const Inside&) = delete;
  Inside& operator=(const Inside&) = delete;

 private:
  ncclComm_t const comm_;
};

struct GroupCall {
  NcclCallPointer call;
  cudaStream_t stream;
};
thread_local int group_depth = 0;
thread_local std::vector<GroupCall> group_calls;

int RandomPolls() {
  NcclGlobals& globals = NcclGlobals::Get();
  const Lock lock(globals.mu);
  return static_cast<int>(globals.random() % (kMostPolls + 1));
}

// Checks that ranks call the same collectives in the same order. The first call decides.
void CheckOrder(const NcclCallPointer& call) {
  NcclGlobals& globals = NcclGlobals::Get();
  const Lock lock(globals.mu);
  call->sequence = call->comm->sequence++;
  const auto [first, is_first] = call->comm->world->first.try_emplace(call->sequence, call);
  if (is_first || call->Matches(*first->second) || globals.faults.mismatch_hangs) return;
  NcclMisuse(call->name(), "all ranks must call the same collectives in the same order: call " +
                               std::to_string(call->sequence) + " is " + call->Text() +
                               " on rank " + std::to_string(call->comm->rank) + " and " +
                               first->second->Text() + " on rank " +
                               std::to_string(first->second->comm->rank));
}

// Enqueues one kernel, now or some polls later.
ncclResult_t Submit(ncclComm_t comm, cudaStream_t stream, std::vector<NcclCallPointer> calls) {
  const char* const name = calls[0]->name();
  const auto kernel = std::make_shared<NcclKernel>(comm, std::move(calls));
  int polls = RandomPolls();
  if (polls == 0) {
    kernel->EnterStream();
    Streams::Get().EnqueueExternal(name, stream, kernel);
    return ncclSuccess;
  }
  const int64_t before = Streams::Get().Enqueued(name, stream);
  comm->in_progress = [=]() mutable {
    if (--polls > 0) return false;
    if (Streams::Get().Enqueued(name, stream) != before) {
      NcclMisuse(name, "work was put into the stream while the call was in progress");
    }
    kernel->EnterStream();
    Streams::Get().EnqueueExternal(name, stream, kernel);
    return true;
  };
  return ncclInProgress;
}

ncclResult_t EndGroup() {
  std::vector<GroupCall> calls;
  calls.swap(group_calls);
  ncclResult_t result = ncclSuccess;
  while (!calls.empty()) {
    ncclComm_t const comm = calls.front().call->comm;
    cudaStream_t const stream = calls.front().stream;
    std::vector<NcclCallPointer> own;
    std::vector<GroupCall> rest;
    for (const GroupCall& c : calls) {
      if (c.call->comm != comm) {
        rest.push_back(c);
        continue;
      }
      if (c.stream != stream) NcclMisuse(c.call->name(), "the fake has one stream for a group");
      own.push_back(c.call);
    }
    calls.swap(rest);
    if (Submit(comm, stream, std::move(own)) == ncclInProgress) result = ncclInProgress;
  }
  return result;
}

ncclResult_t Enqueue(const NcclCallRecord& record, cudaStream_t stream) {
  const auto call = std::make_shared<NcclCallRecord>(record);
  const Inside inside(call->name(), call->comm);
  std::this_thread::yield();  // gives another thread the chance to be found here
  if (call->comm->error != ncclSuccess) return call->comm->error;
  if (Streams::Get().DeviceOf(call->name(), stream) != call->comm->device) {
    NcclMisuse(call->name(), "the stream is of another device than the communicator");
  }
  if (record.peer < 0 || record.peer >= call->comm->world->size) return ncclInvalidArgument;
  if (record.count == 0) return ncclSuccess;
  if (!call->IsTransfer()) CheckOrder(call);
  if (group_depth > 0) {
    group_calls.push_back({call, stream});
    return ncclSuccess;
  }
  return Submit(call->comm, stream, {call});
}

// `blocks` times the elements of a call.
template <typename Pointer>
struct Blocks {
  Pointer data = nullptr;
  int blocks = 0;
};

NcclCallRecord CallOf(Kind kind, ncclComm_t comm, Blocks<const void*> send, Blocks<void*> recv,
                      size_t count, ncclDataType_t type) {
  const size_t bytes = count * NcclSizeOf(type);
  return {.kind = kind,
          .comm = comm,
          .send = static_cast<const char*>(send.data),
          .recv = static_cast<char*>(recv.data),
          .send_bytes = bytes * static_cast<size_t>(send.blocks),
          .recv_bytes = bytes * static_cast<size_t>(recv.blocks),
          .count = count,
          .type = type};
}

std::shared_ptr<NcclWorld> NewWorld(int size) {
  auto world = std::make_shared<NcclWorld>();
  world->size = size;
  world->ranks.resize(static_cast<size_t>(size));
  return world;
}

// The environment comes before a communicator's own setting.
int BlocksOf(const ncclConfig_t& config) {
  constexpr int kOwnChoice = 32;
  if (const char* const most = std::getenv("NCCL_MAX_CTAS")) return std::atoi(most);
  return config.maxCTAs == NCCL_CONFIG_UNDEF_INT ? kOwnChoice : config.maxCTAs;
}

ncclComm_t NewComm(const std::shared_ptr<NcclWorld>& world, int rank, int root_rank, int device,
                   int kernel_blocks) {
  auto* const comm = new ncclComm;  // never freed, so that use after its end can be named
  comm->world = world;
  comm->rank = rank;
  comm->root_rank = root_rank;
  comm->device = device;
  comm->kernel_blocks = kernel_blocks;
  world->ranks[static_cast<size_t>(rank)] = comm;
  NcclGlobals::Get().communicators.push_back(comm);
  return comm;
}

// Whether all ranks have joined; finds one GPU that two ranks share.
bool Joined(ncclComm_t comm) {
  const Lock lock(NcclGlobals::Get().mu);
  if (NcclGlobals::Get().faults.init_hangs || !comm->world->complete()) return false;
  for (const ncclComm* other : comm->world->ranks) {
    if (other != comm && other->device == comm->device) comm->error = ncclInvalidUsage;
  }
  return true;
}

// Whether all ranks have called the split; makes this rank's new communicator.
bool SplitEnded(ncclComm_t comm, int64_t sequence, int kernel_blocks, ncclComm_t* made) {
  const Lock lock(NcclGlobals::Get().mu);
  cusim::NcclSplit& split = comm->world->splits[sequence];
  if (static_cast<int>(split.wishes.size()) < comm->world->size) return false;
  const int color = split.wishes[comm->rank].first;
  if (color == NCCL_SPLIT_NOCOLOR) return true;
  std::vector<std::pair<int, int>> members;  // (key, rank)
  for (const auto& [rank, wish] : split.wishes) {
    if (wish.first == color) members.emplace_back(wish.second, rank);
  }
  std::sort(members.begin(), members.end());
  auto& world = split.made[color];
  if (world == nullptr) world = NewWorld(static_cast<int>(members.size()));
  const auto own = std::find_if(members.begin(), members.end(),
                                [&](const auto& member) { return member.second == comm->rank; });
  *made = NewComm(world, static_cast<int>(own - members.begin()), comm->root_rank, comm->device,
                  kernel_blocks);
  (*made)->in_progress = [made_comm = *made] {
    return Joined(made_comm);
  };
  return true;
}

}  // namespace

namespace cusim {

NcclFaults Set(const NcclFaults& now) {
  NcclGlobals& globals = NcclGlobals::Get();
  std::unique_lock<std::mutex> lock(globals.mu);
  const NcclFaults before = std::exchange(globals.faults, now);
  while (now.abort_hangs < 0 && globals.hanging_aborts > 0) {  // until they have returned
    lock.unlock();
    std::this_thread::yield();
    lock.lock();
  }
  return before;
}

void RaiseInNccl(int rank, ncclResult_t error) {
  const Lock lock(NcclGlobals::Get().mu);
  for (ncclComm* comm : NcclGlobals::Get().communicators) {
    if (!comm->gone() && comm->root_rank == rank) comm->error = error;
  }
}

int64_t NcclCommunicators() {
  const Lock lock(NcclGlobals::Get().mu);
  const auto& all = NcclGlobals::Get().communicators;
  return std::count_if(all.begin(), all.end(), [](const ncclComm* comm) { return !comm->gone(); });
}

int64_t NcclCallsFromOtherDevices() {
  const Lock lock(NcclGlobals::Get().mu);
  return NcclGlobals::Get().calls_from_other_devices;
}

}  // namespace cusim

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
  const Lock lock(NcclGlobals::Get().mu);
  *version = NcclGlobals::Get().faults.version;
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
  switch (result) {
    case ncclSuccess:
      return "no error";
    case ncclRemoteError:
      return "a remote process is gone, or the network failed (simulated)";
    case ncclInvalidUsage:
      return "invalid usage (simulated)";
    default:
      return "an error (simulated)";
  }
}
const char* ncclGetLastError(ncclComm_t) {
  return "";
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  NcclGlobals& globals = NcclGlobals::Get();
  const Lock lock(globals.mu);
  *id = {};
  const std::string text = "fake NCCL id " + std::to_string(globals.next_id++);
  std::memcpy(id->internal, text.c_str(), text.size());
  return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int ranks, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  if (config == nullptr || config->blocking != 0) {
    NcclMisuse(__func__, "the fake has non-blocking communicators alone");
  }
  if (ranks < 1 || rank < 0 || rank >= ranks) return ncclInvalidArgument;
  int device = 0;
  cudaGetDevice(&device);
  NcclGlobals& globals = NcclGlobals::Get();
  const Lock lock(globals.mu);
  auto& world = globals.worlds[std::string(id.internal, sizeof(id.internal))];
  if (world == nullptr) world = NewWorld(ranks);
  if (world->size != ranks) NcclMisuse(__func__, "ranks must give the same number of ranks");
  if (world->ranks[static_cast<size_t>(rank)] != nullptr) {
    NcclMisuse(__func__, "rank " + std::to_string(rank) + " has joined before");
  }
  *comm = NewComm(world, rank, rank, device, BlocksOf(*config));
  (*comm)->in_progress = [made = *comm] {
    return Joined(made);
  };
  return ncclInProgress;
}

ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made,
                           ncclConfig_t* config) {
  const Inside inside(__func__, comm);
  if (group_depth > 0) NcclMisuse(__func__, "the fake splits outside groups");
  if (config == nullptr || config->blocking != 0) {
    NcclMisuse(__func__, "the fake has non-blocking communicators alone");
  }
  if (comm->error != ncclSuccess) return comm->error;
  *made = nullptr;
  const auto call = std::make_shared<NcclCallRecord>();
  call->kind = Kind::kSplit;
  call->comm = comm;
  CheckOrder(call);
  const Lock lock(NcclGlobals::Get().mu);
  if (comm->kernels_ended != comm->kernels_made) {
    NcclMisuse(__func__, "operations of the communicator are under way");
  }
  comm->world->splits[call->sequence].wishes[comm->rank] = {color, key};
  comm->in_progress = [=, sequence = call->sequence, blocks = BlocksOf(*config)] {
    return SplitEnded(comm, sequence, blocks, made);
  };
  return ncclInProgress;
}

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* state) {
  const Inside inside(__func__, comm, true);
  Streams::Get().RunSome();  // meanwhile the devices make progress
  if (comm->in_progress != nullptr && comm->in_progress()) comm->in_progress = nullptr;
  const Lock lock(NcclGlobals::Get().mu);
  *state = comm->error != ncclSuccess     ? comm->error
           : comm->in_progress != nullptr ? ncclInProgress
                                          : ncclSuccess;
  return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
  const Inside inside(__func__, comm);
  const Lock lock(NcclGlobals::Get().mu);
  comm->life = ncclComm::Life::kFinalized;
  comm->in_progress = [comm] {
    const Lock again(NcclGlobals::Get().mu);
    return comm->kernels_ended == comm->kernels_made;
  };
  return ncclInProgress;
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
  const Inside inside(__func__, comm, true);
  const Lock lock(NcclGlobals::Get().mu);
  if (comm->life != ncclComm::Life::kFinalized || comm->in_progress != nullptr) {
    NcclMisuse(__func__, "finalize first, and poll until that has ended: it would wait for peers");
  }
  comm->life = ncclComm::Life::kDestroyed;
  return ncclSuccess;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Inside inside(__func__, comm, true);
  {
    const Lock lock(NcclGlobals::Get().mu);
    comm->life = ncclComm::Life::kAborted;
    comm->in_progress = nullptr;
  }
  // As in NCCL: waits until its kernels have left the streams, where others' may precede them.
  while (true) {
    Streams::Get().RunSome();
    {
      const Lock lock(NcclGlobals::Get().mu);
      if (comm->kernels_ended == comm->kernels_made) break;
    }
    std::this_thread::yield();
  }
  NcclGlobals& globals = NcclGlobals::Get();
  std::unique_lock<std::mutex> lock(globals.mu);
  ++globals.hanging_aborts;
  while (globals.faults.abort_hangs == comm->root_rank) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
  --globals.hanging_aborts;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group_depth;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (group_depth == 0) NcclMisuse(__func__, "there is no group to end");
  return --group_depth > 0 ? ncclSuccess : EndGroup();
}

ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
  NcclCallRecord call = CallOf(Kind::kSend, comm, {data, 1}, {}, count, type);
  call.peer = peer;
  return Enqueue(call, stream);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  NcclCallRecord call = CallOf(Kind::kRecv, comm, {}, {data, 1}, count, type);
  call.peer = peer;
  return Enqueue(call, stream);
}
ncclResult_t ncclAllReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  NcclCallRecord call = CallOf(Kind::kAllReduce, comm, {send, 1}, {recv, 1}, count, type);
  call.op = op;
  return Enqueue(call, stream);
}
ncclResult_t ncclReduce(const void* send, void* recv, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
  NcclCallRecord call =
      CallOf(Kind::kReduce, comm, {send, 1}, {recv, comm->rank == root ? 1 : 0}, count, type);
  call.op = op;
  call.peer = root;
  return Enqueue(call, stream);
}
ncclResult_t ncclReduceScatter(const void* send, void* recv, size_t count, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream) {
  NcclCallRecord call =
      CallOf(Kind::kReduceScatter, comm, {send, comm->world->size}, {recv, 1}, count, type);
  call.op = op;
  return Enqueue(call, stream);
}
ncclResult_t ncclAllGather(const void* send, void* recv, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream) {
  return Enqueue(CallOf(Kind::kAllGather, comm, {send, 1}, {recv, comm->world->size}, count, type),
                 stream);
}
ncclResult_t ncclBroadcast(const void* send, void* recv, size_t count, ncclDataType_t type,
                           int root, ncclComm_t comm, cudaStream_t stream) {
  NcclCallRecord call = CallOf(Kind::kBroadcast, comm, {send, 1}, {recv, 1}, count, type);
  call.peer = root;
  return Enqueue(call, stream);
}

}  // extern "C"
