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

// MPI moves data only inside its calls, so waiting is calling, also while a large message is on its
// way. Cores may be fewer than ranks: after the first polls every poll offers the core to others.
// Only a peer that is far behind is worth sleeping for.
constexpr int kSpinPolls = 200;
constexpr std::chrono::milliseconds kNapAfter(10);
constexpr std::chrono::microseconds kNap(50);

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
  if (status.ok()) return status;
  DropRequests();
  return fate_->Kill(std::move(status));
}

// Polls one request at a time, which moves the others too: the cost of a poll does not grow with
// their number.
absl::Status MpiLane::Poll() {
  const auto start = Clock::now();
  int polls = 0;
  for (size_t at = 0; at < requests_.size();) {
    int done = 0;
    MOE_RETURN_IF_ERROR(Test(at, &done));
    if (done != 0) {
      ++at;
      polls = 0;
      continue;
    }
    if (fate_->dead()) return fate_->status();  // Abort, or another group of this world
    if (polls < kSpinPolls) {
      ++polls;
      continue;
    }
    const auto waited = Clock::now() - start;
    if (absl::FromChrono(waited) > timeout_) return Late(at, absl::FromChrono(waited));
    if (waited < kNapAfter) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  return absl::OkStatus();
}

absl::Status MpiLane::Test(size_t i, int* done) {
  const Transfer& transfer = transfers_[i];
  MPI_Status status;
  const int code = MPI_Test(&requests_[i], done, &status);
  if (code != MPI_SUCCESS) {
    int error_class = MPI_SUCCESS;
    MPI_Error_class(code, &error_class);
    return error_class == MPI_ERR_TRUNCATE && transfer.receives ? Disagree(transfer, "more")
                                                                : FromMpi(code, call_.operation);
  }
  if (*done == 0 || !transfer.receives) return absl::OkStatus();
  int bytes = 0;
  MPI_Get_count(&status, MPI_BYTE, &bytes);
  return bytes == transfer.bytes ? absl::OkStatus() : Disagree(transfer, absl::StrCat(bytes));
}

absl::Status MpiLane::Disagree(const Transfer& transfer, absl::string_view sent) const {
  return absl::InvalidArgumentError(
      absl::StrCat(call_.operation, ": rank ", world_ranks_[rank_], " expects ", transfer.bytes,
                   " bytes from rank ", world_ranks_[transfer.peer], ", which sends ", sent));
}

absl::Status MpiLane::Late(size_t first, absl::Duration waited) {
  std::vector<int> missing;
  for (size_t i = first; i < requests_.size(); ++i) {
    int done = 0;
    MOE_RETURN_IF_ERROR(Test(i, &done));
    if (done != 0) continue;
    if (transfers_[i].peer >= 0) {
      missing.push_back(world_ranks_[transfers_[i].peer]);
      continue;
    }
    // An operation of the library does not tell whom it waits for.
    missing = world_ranks_;
    missing.erase(missing.begin() + rank_);
  }
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  const std::string place = DescribePlace(world_ranks_[rank_], call_.operation, call_.phase);
  return LateError(place, missing, waited, timeout_);
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
