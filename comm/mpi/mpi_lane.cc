#include "comm/mpi/mpi_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/mpi/mpi_status.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using Clock = std::chrono::steady_clock;

// MPI counts are int: larger transfers go in pieces.
constexpr int64_t kPieceBytes = int64_t{1} << 30;

// MPI moves data only inside its calls, so waiting is calling. A peer that runs answers within the
// first polls; then cores may be fewer than ranks, and a rank that keeps its core keeps its peers
// from sending.
constexpr int kSpinPolls = 200;
constexpr int kYieldPolls = 400;
constexpr std::chrono::microseconds kNap(50);

void BackOff(int polls) {
  if (polls < kSpinPolls) return;
  if (polls < kSpinPolls + kYieldPolls) {
    std::this_thread::yield();
    return;
  }
  std::this_thread::sleep_for(kNap);
}

}  // namespace

absl::Status MpiFate::Kill(absl::Status reason) {
  std::lock_guard<std::mutex> lock(mu_);
  if (reason_.ok()) reason_ = std::move(reason);
  dead_.store(true, std::memory_order_release);
  return reason_;
}

absl::Status MpiFate::status() const {
  std::lock_guard<std::mutex> lock(mu_);
  return reason_;
}

MpiLane::MpiLane(MPI_Comm comm, std::vector<int> world_ranks, absl::Duration timeout,
                 std::shared_ptr<MpiFate> fate)
    : comm_(comm), world_ranks_(std::move(world_ranks)), timeout_(timeout), fate_(std::move(fate)) {
  MPI_Comm_rank(comm_, &rank_);
}

// A dead world may hold operations that never complete; freeing their communicator could wait.
MpiLane::~MpiLane() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (fate_->dead() || finalized != 0) return;
  MPI_Comm comm = comm_;
  MPI_Comm_free(&comm);
}

void MpiLane::Begin(const MpiCall& call) {
  call_ = call;
  started_ = absl::OkStatus();
  transfers_.clear();
  requests_.clear();
}

void MpiLane::Started(int code, const Transfer& transfer, MPI_Request request) {
  started_.Update(FromMpi(code, call_.operation));
  transfers_.push_back(transfer);
  requests_.push_back(request);
}

void MpiLane::Send(int peer, const void* data, int64_t bytes) {
  if (fate_->dead()) return;  // Finish says so
  const auto* from = static_cast<const std::byte*>(data);
  do {
    const int64_t piece = std::min(bytes, kPieceBytes);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code =
        MPI_Isend(from, static_cast<int>(piece), MPI_BYTE, peer, call_.tag, comm_, &request);
    Started(code, {.peer = peer, .bytes = piece, .receives = false}, request);
    from += piece;
    bytes -= piece;
  } while (bytes > 0);
}

void MpiLane::Receive(int peer, void* data, int64_t bytes) {
  if (fate_->dead()) return;
  auto* to = static_cast<std::byte*>(data);
  do {
    const int64_t piece = std::min(bytes, kPieceBytes);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code =
        MPI_Irecv(to, static_cast<int>(piece), MPI_BYTE, peer, call_.tag, comm_, &request);
    Started(code, {.peer = peer, .bytes = piece, .receives = true}, request);
    to += piece;
    bytes -= piece;
  } while (bytes > 0);
}

absl::Status MpiLane::Finish() {
  if (fate_->dead()) return fate_->status();
  absl::Status status = started_;
  if (status.ok()) status = Poll();
  if (status.ok()) status = CheckReceived();
  if (status.ok()) return status;
  DropRequests();
  return fate_->Kill(std::move(status));
}

absl::Status MpiLane::Poll() {
  statuses_.resize(requests_.size());
  const auto start = Clock::now();
  for (int polls = 0;; polls = std::min(polls + 1, kSpinPolls + kYieldPolls)) {
    int done = 0;
    const int code =
        MPI_Testall(static_cast<int>(requests_.size()), requests_.data(), &done, statuses_.data());
    if (code != MPI_SUCCESS) return Broken(code);
    if (done != 0) return absl::OkStatus();
    if (fate_->dead()) return fate_->status();  // Abort, or another group of this world
    if (polls < kSpinPolls) continue;
    const absl::Duration waited = absl::FromChrono(Clock::now() - start);
    if (waited > timeout_) {
      const std::string place = DescribePlace(world_ranks_[rank_], call_.operation, call_.phase);
      return LateError(place, Missing(), waited, timeout_);
    }
    BackOff(polls);
  }
}

// Ranks whose part is not done. An operation of the library does not tell whom it waits for.
std::vector<int> MpiLane::Missing() {
  std::vector<int> missing;
  for (size_t i = 0; i < requests_.size(); ++i) {
    int done = 0;
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    MPI_Request_get_status(requests_[i], &done, MPI_STATUS_IGNORE);
    if (done != 0) continue;
    if (transfers_[i].peer >= 0) {
      missing.push_back(world_ranks_[transfers_[i].peer]);
      continue;
    }
    for (int r = 0; r < size(); ++r) {
      if (r != rank_) missing.push_back(world_ranks_[r]);
    }
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return missing;
}

absl::Status MpiLane::Broken(int code) const {
  int error_class = MPI_SUCCESS;
  MPI_Error_class(code, &error_class);
  if (error_class != MPI_ERR_IN_STATUS) return FromMpi(code, call_.operation);
  for (size_t i = 0; i < statuses_.size(); ++i) {
    const int error = statuses_[i].MPI_ERROR;
    if (error == MPI_SUCCESS || error == MPI_ERR_PENDING) continue;
    MPI_Error_class(error, &error_class);
    if (error_class == MPI_ERR_TRUNCATE && transfers_[i].peer >= 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          call_.operation, ": rank ", world_ranks_[rank_], " expects ", transfers_[i].bytes,
          " bytes from rank ", world_ranks_[transfers_[i].peer], ", which sends more"));
    }
    return FromMpi(error, call_.operation);
  }
  return FromMpi(code, call_.operation);
}

absl::Status MpiLane::CheckReceived() const {
  for (size_t i = 0; i < transfers_.size(); ++i) {
    if (!transfers_[i].receives) continue;
    int bytes = 0;
    MPI_Get_count(&statuses_[i], MPI_BYTE, &bytes);
    if (bytes == transfers_[i].bytes) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        call_.operation, ": rank ", world_ranks_[rank_], " expects ", transfers_[i].bytes,
        " bytes from rank ", world_ranks_[transfers_[i].peer], ", which sends ", bytes));
  }
  return absl::OkStatus();
}

// The caller gets its buffers back: what has not started to arrive is cancelled. What MPI already
// moves cannot be stopped; the process is about to leave.
void MpiLane::DropRequests() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL || transfers_[i].peer < 0) continue;
    if (transfers_[i].receives) MPI_Cancel(&requests_[i]);
    MPI_Request_free(&requests_[i]);
  }
  requests_.clear();
  transfers_.clear();
}

absl::Status MpiLane::Meet(const MpiCall& call) {
  Begin(call);
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    Receive(r, nullptr, 0);
    Send(r, nullptr, 0);
  }
  return Finish();
}

absl::Status MpiLane::Gather(const MpiCall& call, const void* mine, void* all, int64_t bytes) {
  auto* const out = static_cast<std::byte*>(all);
  Begin(call);
  for (int i = 1; i < size(); ++i) {
    const int r = (rank_ + i) % size();
    Receive(r, out + r * bytes, bytes);
  }
  for (int i = 1; i < size(); ++i) Send((rank_ + i) % size(), mine, bytes);
  if (out + rank_ * bytes != mine && bytes > 0) {
    std::copy_n(static_cast<const std::byte*>(mine), bytes, out + rank_ * bytes);
  }
  return Finish();
}

}  // namespace moe
