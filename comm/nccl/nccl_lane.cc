#include "comm/nccl/nccl_lane.h"

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/wait_report.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr std::chrono::microseconds kNap(50);

// comm/ sees CUDA through nccl.h alone: CudaStatus is internal to kernels/.
absl::Status CudaError(cudaError_t error, const std::string& place) {
  return absl::InternalError(
      absl::StrCat(place, ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
}

ncclConfig_t NonBlocking(int most_blocks) {
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  config.minCTAs = 1;
  config.maxCTAs = most_blocks;
  // NCCL's clusters of four blocks would need four free multiprocessors of one GPC.
  config.cgaClusterSize = 0;
  return config;
}

}  // namespace

NcclLane::NcclLane(std::shared_ptr<NcclRank> rank, ncclComm_t comm, std::vector<int> world_ranks,
                   int own)
    : rank_(std::move(rank)),
      world_ranks_(std::move(world_ranks)),
      own_(own),
      handle_(std::make_shared<NcclHandle>(
          rank_->api(), rank_->device(), comm,
          absl::StrCat(Place({.operation = "ncclCommAbort"}), " of the communicator of ranks ",
                       absl::StrJoin(world_ranks_, ", ")))),
      mu_(handle_->mu) {
  rank_->Add(this);
}

// After ncclCommFinalize has ended, ncclCommDestroy is local. Peers that are late to come to their
// own end cost this rank at most the deadline, and this communicator alone.
NcclLane::~NcclLane() {
  const bool ended = Finalize();
  rank_->Remove(this);
  if (ended && handle_->comm != nullptr) {
    (void)rank_->api().ncclCommDestroy(handle_->comm);
  } else {
    Abort();
  }
  for (const Operation& operation : operations_) {
    idle_.push_back(operation.begin);
    idle_.push_back(operation.end);
  }
  for (cudaEvent_t event : idle_) (void)cudaEventDestroy(event);
}

bool NcclLane::Finalize() {
  Patience patience(rank_->timeout());
  for (bool first = true; !rank_->dead(); first = false) {
    ncclResult_t state = ncclSuccess;
    {
      const std::lock_guard<std::mutex> lock(mu_);
      if (handle_->comm == nullptr) return false;
      ncclResult_t result = first ? rank_->api().ncclCommFinalize(handle_->comm) : ncclSuccess;
      if (result == ncclSuccess || result == ncclInProgress) {
        result = rank_->api().ncclCommGetAsyncError(handle_->comm, &state);
      }
      if (result != ncclSuccess) state = result;
    }
    if (state == ncclSuccess) return true;
    if (state != ncclInProgress || patience.IsOver(false)) {
      Log(LogLevel::kWarning,
          absl::StrCat(Place({.operation = "ncclCommFinalize"}),
                       ": peers did not come to the end of this communicator: it is aborted"));
      return false;
    }
    std::this_thread::sleep_for(kNap);
  }
  return false;
}

absl::StatusOr<std::unique_ptr<NcclLane>> NcclLane::Join(std::shared_ptr<NcclRank> rank,
                                                         const ncclUniqueId& id,
                                                         const NcclCall& call,
                                                         std::vector<int> world_ranks, int own,
                                                         int most_blocks) {
  if (const cudaError_t error = cudaSetDevice(rank->device()); error != cudaSuccess) {
    return CudaError(error, call.operation);
  }
  std::unique_ptr<NcclLane> lane(
      new NcclLane(std::move(rank), nullptr, std::move(world_ranks), own));
  ncclConfig_t config = NonBlocking(most_blocks);
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard<std::mutex> lock(lane->mu_);
    result = lane->rank_->api().ncclCommInitRankConfig(&lane->handle_->made, lane->size(), id, own,
                                                       &config);
    lane->handle_->comm = lane->handle_->made;
  }
  MOE_RETURN_IF_ERROR(lane->Fail(call, result));
  MOE_RETURN_IF_ERROR(lane->WaitUntilPosted(call));
  const std::lock_guard<std::mutex> lock(lane->mu_);
  lane->handle_->made = nullptr;
  return lane;
}

absl::StatusOr<std::unique_ptr<NcclLane>> NcclLane::Split(const NcclCall& call, int color,
                                                          std::vector<int> members, int own,
                                                          int most_blocks) {
  ncclConfig_t config = NonBlocking(most_blocks);
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (handle_->comm == nullptr) return rank_->status();
    result = rank_->api().ncclCommSplit(handle_->comm, color < 0 ? NCCL_SPLIT_NOCOLOR : color, own,
                                        &handle_->made, &config);
  }
  MOE_RETURN_IF_ERROR(Fail(call, result));
  MOE_RETURN_IF_ERROR(WaitUntilPosted(call));
  if (color < 0) return nullptr;
  ncclComm_t made = nullptr;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    made = std::exchange(handle_->made, nullptr);
  }
  std::unique_ptr<NcclLane> lane(new NcclLane(rank_, made, std::move(members), own));
  MOE_RETURN_IF_ERROR(lane->WaitUntilPosted(call));
  return lane;
}

absl::Status NcclLane::Launch(const NcclCall& call, Stream& stream, Start start) {
  if (rank_->dead()) return rank_->status();
  if (stream.device().index != rank_->device()) {
    return absl::InvalidArgumentError(
        absl::StrCat(call.operation, ": the stream is of CUDA device ", stream.device().index,
                     ", expected this rank's, ", rank_->device()));
  }
  stream.Guard(rank_->guard());
  return stream.Launch([&](void* native) -> absl::Status {
    const auto cuda = static_cast<cudaStream_t>(native);
    absl::StatusOr<Operation> begun = Begin(call, cuda);
    if (!begun.ok()) return rank_->Kill(begun.status());  // peers are in this call
    Operation operation = *std::move(begun);
    absl::Status status = Post(call, cuda, start);
    const cudaError_t error = cudaEventRecord(operation.end, cuda);
    if (status.ok() && error != cudaSuccess) status = CudaError(error, Place(call));
    {
      const std::lock_guard<std::mutex> lock(mu_);
      operations_.push_back(std::move(operation));  // owns the events, whatever became of it
    }
    rank_->Wake();
    return status;
  });
}

// Puts NCCL's work into the stream, into which nothing else may go meanwhile.
absl::Status NcclLane::Post(const NcclCall& call, cudaStream_t stream, Start start) {
  ncclResult_t result = ncclSuccess;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    if (handle_->comm == nullptr) return rank_->status();
    result = start(handle_->comm, stream);
  }
  MOE_RETURN_IF_ERROR(Fail(call, result));
  return result == ncclInProgress ? WaitUntilPosted(call) : absl::OkStatus();
}

absl::StatusOr<NcclLane::Operation> NcclLane::Begin(const NcclCall& call, cudaStream_t stream) {
  Operation operation = {.call = call};
  const std::lock_guard<std::mutex> lock(mu_);
  cudaError_t error = cudaSuccess;
  for (cudaEvent_t* const event : {&operation.begin, &operation.end}) {
    if (idle_.empty()) {
      cudaEvent_t made = nullptr;
      error = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
      if (error != cudaSuccess) break;
      idle_.push_back(made);
    }
    *event = idle_.back();
    idle_.pop_back();
  }
  if (error == cudaSuccess) error = cudaEventRecord(operation.begin, stream);
  if (error == cudaSuccess) return operation;
  for (cudaEvent_t event : {operation.begin, operation.end}) {
    if (event != nullptr) idle_.push_back(event);
  }
  return CudaError(error, Place(call));
}

// Polls until NCCL's last call has ended. Waits for peers where NCCL does: to join, to split, and
// to connect before a first exchange. Later calls end in less than a nap, so that it comes second.
absl::Status NcclLane::WaitUntilPosted(const NcclCall& call) {
  Patience patience(TimeoutOf(call));
  const auto first_nap = std::chrono::steady_clock::now() + kNap;
  while (true) {
    ncclResult_t state = ncclSuccess;
    bool over = rank_->dead();
    if (!over) {
      const std::lock_guard<std::mutex> lock(mu_);
      over = handle_->comm == nullptr;
      const ncclResult_t asked =
          over ? ncclSuccess : rank_->api().ncclCommGetAsyncError(handle_->comm, &state);
      if (asked != ncclSuccess) state = asked;
    }
    if (over) {
      Abort();  // joins NCCL's own thread: nothing goes into the stream after this
      return rank_->status();
    }
    if (state != ncclInProgress) return Fail(call, state);
    if (patience.IsOver(false)) {
      const absl::Status late = rank_->Kill(Late(call, patience.waited()));
      Abort();
      return late;
    }
    if (std::chrono::steady_clock::now() < first_nap) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
}

absl::Status NcclLane::Fail(const NcclCall& call, ncclResult_t result) {
  absl::Status status = NcclStatus(rank_->api(), result, Place(call));
  return status.ok() ? status : rank_->Kill(std::move(status));
}

std::string NcclLane::Place(const NcclCall& call) const {
  return DescribePlace(world_ranks_[own_], call.operation, call.site);
}

absl::Status NcclLane::Late(const NcclCall& call, absl::Duration waited) const {
  std::vector<int> missing;
  for (const int peer : call.peers) missing.push_back(world_ranks_[peer]);
  if (missing.empty()) {
    missing = world_ranks_;
    missing.erase(missing.begin() + own_);
  }
  return LateError(Place(call), missing, waited, TimeoutOf(call));
}

absl::Status NcclLane::Look(bool* any) {
  const std::lock_guard<std::mutex> lock(mu_);
  if (handle_->comm == nullptr) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(Drop(any));
  if (operations_.empty()) return absl::OkStatus();
  Operation& oldest = operations_.front();
  ncclResult_t state = ncclSuccess;
  const ncclResult_t asked = rank_->api().ncclCommGetAsyncError(handle_->comm, &state);
  const bool is_over = oldest.patience.has_value() && oldest.patience->IsOver(false);
  const absl::Duration waited =
      oldest.patience.has_value() ? oldest.patience->waited() : absl::ZeroDuration();
  const absl::Status status =
      NcclStatus(rank_->api(), asked != ncclSuccess ? asked : state, "ncclCommGetAsyncError");
  if (!status.ok()) {
    return {status.code(),
            absl::StrCat(Place(oldest.call), ": ", status.message(), ", after ",
                         absl::FormatDuration(absl::Trunc(waited, absl::Milliseconds(1))))};
  }
  return is_over ? Late(oldest.call, waited) : absl::OkStatus();
}

// Takes out what has ended and notes what has begun. Called with mu_ held.
absl::Status NcclLane::Drop(bool* any) {
  while (!operations_.empty()) {
    Operation& oldest = operations_.front();
    cudaError_t error = cudaEventQuery(oldest.end);
    if (error == cudaSuccess) {
      idle_.push_back(oldest.begin);
      idle_.push_back(oldest.end);
      operations_.pop_front();
      continue;
    }
    *any = true;
    if (error == cudaErrorNotReady && !oldest.patience.has_value()) {
      error = cudaEventQuery(oldest.begin);
      if (error == cudaSuccess) oldest.patience.emplace(TimeoutOf(oldest.call));
    }
    (void)cudaGetLastError();  // "not ready" is no error of this thread's next call
    if (error == cudaSuccess || error == cudaErrorNotReady) return absl::OkStatus();
    return CudaError(error, Place(oldest.call));
  }
  return absl::OkStatus();
}

void NcclLane::Abort() {
  handle_->BeginAbort();
  handle_->AwaitAbort(rank_->timeout());
}

void NcclHandle::BeginAbort() {
  std::unique_lock<std::mutex> lock(mu);
  if (comm == nullptr) return;
  begun_ = std::chrono::steady_clock::now();
  ended_ = false;
  const ncclComm_t aborted = std::exchange(comm, nullptr);
  lock.unlock();
  try {
    std::thread([self = shared_from_this(), aborted] { self->Abort(aborted); }).detach();
  } catch (const std::exception&) {  // no memory, or no more threads
    Abort(aborted);
  }
}

void NcclHandle::Abort(ncclComm_t aborted) {
  (void)cudaSetDevice(device_);
  (void)api_.ncclCommAbort(aborted);  // joins the thread that writes `made`
  std::unique_lock<std::mutex> lock(mu);
  const ncclComm_t second = std::exchange(made, nullptr);
  lock.unlock();
  if (second != nullptr && second != aborted) (void)api_.ncclCommAbort(second);
  lock.lock();
  ended_ = true;
  changed_.notify_all();
}

void NcclHandle::AwaitAbort(absl::Duration timeout) {
  std::unique_lock<std::mutex> lock(mu);
  const auto end = begun_ + absl::ToChronoNanoseconds(std::min(timeout, absl::Hours(24)));
  if (changed_.wait_until(lock, end, [this] { return ended_ || left_; })) return;
  left_ = true;
  lock.unlock();
  changed_.notify_all();
  Log(LogLevel::kWarning, absl::StrCat(name_, ": it did not return within ",
                                       absl::FormatDuration(timeout), " and is left behind"));
}

}  // namespace moe
