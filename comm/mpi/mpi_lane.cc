#include "comm/mpi/mpi_lane.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>

#include "comm/patience.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

// Transfers go in pieces, of which all but the last are of this size and the last is shorter, if
// need be empty: sizes that differ by whole pieces are seen to differ. MPI counts are int; and it
// tells of a transfer only that it has ended, so that pieces are what shows progress. 16 MiB from
// each of 60 peers at once is within a deadline of 60 s at 16 MiB/s.
constexpr int64_t kPieceBytes = int64_t{16} << 20;

// MPI moves data only inside its calls, so waiting is calling, also while a large message is on its
// way. Cores may be fewer than ranks: after the first polls every poll offers the core to others.
// Only a peer that is far behind is worth sleeping for.
constexpr int kSpinPolls = 200;
constexpr absl::Duration kNapAfter = absl::Milliseconds(10);
constexpr std::chrono::microseconds kNap(50);

}  // namespace

absl::Status FromMpi(int code, absl::string_view what) {
  if (code == MPI_SUCCESS) return absl::OkStatus();
  char text[MPI_MAX_ERROR_STRING];
  int length = 0;
  if (MPI_Error_string(code, text, &length) != MPI_SUCCESS) length = 0;
  return absl::UnavailableError(
      absl::StrCat(what, ": ", absl::string_view(text, static_cast<size_t>(length))));
}

MpiLane::MpiLane(MPI_Comm comm, std::vector<int> world_ranks, absl::Duration timeout,
                 std::shared_ptr<LocalFate> fate)
    : comm_(comm), world_ranks_(std::move(world_ranks)), timeout_(timeout), fate_(std::move(fate)) {
  MPI_Comm_rank(comm_, &rank_);
}

// A dead world may hold operations that never complete; freeing their communicator could wait, and
// what they write to is not given to anybody else.
MpiLane::~MpiLane() {
  int finalized = 0;
  MPI_Finalized(&finalized);
  if (fate_->dead()) (void)new std::vector<std::byte>(std::move(cards_));
  if (fate_->dead() || finalized != 0) return;
  MPI_Comm comm = comm_;
  MPI_Comm_free(&comm);
}

absl::Status MpiLane::Kill(absl::Status reason) {
  fate_->Kill(world_ranks_[rank_], std::move(reason));
  return status();
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

template <typename Start>
void MpiLane::StartPieces(int peer, int64_t total, bool receives, Start start) {
  if (fate_->dead()) return;  // Finish says so
  int64_t begin = 0, bytes = 0;
  do {
    bytes = std::min(total - begin, kPieceBytes);
    MPI_Request request = MPI_REQUEST_NULL;
    const int code = start(begin, static_cast<int>(bytes), &request);
    Started(code,
            {.peer = peer, .total = total, .begin = begin, .bytes = bytes, .receives = receives},
            request);
    begin += bytes;
  } while (bytes == kPieceBytes);
}

void MpiLane::Send(int peer, const void* data, int64_t bytes) {
  StartPieces(peer, bytes, /*receives=*/false, [&](int64_t begin, int piece, MPI_Request* request) {
    return MPI_Isend(static_cast<const std::byte*>(data) + begin, piece, MPI_BYTE, peer, call_.tag,
                     comm_, request);
  });
}

void MpiLane::Receive(int peer, void* data, int64_t bytes) {
  StartPieces(peer, bytes, /*receives=*/true, [&](int64_t begin, int piece, MPI_Request* request) {
    return MPI_Irecv(static_cast<std::byte*>(data) + begin, piece, MPI_BYTE, peer, call_.tag, comm_,
                     request);
  });
}

absl::Status MpiLane::Finish() {
  if (fate_->dead()) return status();
  absl::Status status = started_;
  if (status.ok()) status = Poll();
  if (status.ok()) return status;
  LeaveRequests();
  return Kill(std::move(status));
}

// Polls one request at a time, which moves the others too: the cost of a poll does not grow with
// their number. All are tested once in a while, for progress.
absl::Status MpiLane::Poll() {
  Patience patience(timeout_ + call_.site.grace);
  absl::Duration tested_all_at;
  int polls = 0;
  bool progressed = false;
  int64_t received_ns = MonotonicNs();
  for (size_t at = 0; at < requests_.size();) {
    int done = 0;
    MOE_RETURN_IF_ERROR(Test(at, &done));
    if (done != 0) {
      if (transfers_[at].receives || transfers_[at].peer < 0) received_ns = MonotonicNs();
      ++at;
      polls = 0;
      progressed = true;
      continue;
    }
    if (fate_->dead()) return status();  // Abort, or another group of this world
    if (polls < kSpinPolls) {
      ++polls;
      continue;
    }
    bool is_over = patience.IsOver(std::exchange(progressed, false));
    if (patience.waited() < tested_all_at) tested_all_at = absl::ZeroDuration();
    if (is_over || patience.waited() > tested_all_at + patience.step()) {
      tested_all_at = patience.waited();
      MOE_ASSIGN_OR_RETURN(const bool any_ended, AnyEnded(at));
      is_over = patience.IsOver(any_ended);
    }
    if (is_over) return Late(at, patience.waited());
    if (patience.waited() < kNapAfter) {
      std::this_thread::yield();
    } else {
      std::this_thread::sleep_for(kNap);
    }
  }
  lingered_ns_ += MonotonicNs() - received_ns;
  return absl::OkStatus();
}

absl::StatusOr<bool> MpiLane::AnyEnded(size_t first) {
  bool any = false;
  for (size_t i = first; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    int done = 0;
    MOE_RETURN_IF_ERROR(Test(i, &done));
    any = any || done != 0;
  }
  return any;
}

absl::Status MpiLane::Test(size_t i, int* done) {
  *done = 1;
  if (requests_[i] == MPI_REQUEST_NULL) return absl::OkStatus();  // ended before
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
  return bytes == transfer.bytes ? absl::OkStatus()
                                 : Disagree(transfer, absl::StrCat(transfer.begin + bytes));
}

absl::Status MpiLane::Disagree(const Transfer& transfer, absl::string_view sent) const {
  return OtherSizeError(call_.operation, world_ranks_[rank_], transfer.total,
                        world_ranks_[transfer.peer], sent);
}

absl::Status MpiLane::Late(size_t first, absl::Duration waited) const {
  std::vector<int> missing;
  for (size_t i = first; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL) continue;
    if (transfers_[i].peer >= 0) {
      missing.push_back(world_ranks_[transfers_[i].peer]);
      continue;
    }
    // An operation of the library does not tell whom it waits for.
    missing = world_ranks_;
    missing.erase(missing.begin() + rank_);
  }
  const std::string place = DescribePlace(world_ranks_[rank_], call_.operation, call_.site);
  return LateError(place, missing, waited, timeout_ + call_.site.grace,
                   host_names_ == nullptr ? absl::Span<const std::string>() : *host_names_);
}

// Leaks what is under way. A receive for which nothing has come is told to take nothing any more.
// Others cannot be stopped, and data may arrive for a request that was freed: these stay until the
// process leaves, which it is about to.
void MpiLane::LeaveRequests() {
  for (size_t i = 0; i < requests_.size(); ++i) {
    if (requests_[i] == MPI_REQUEST_NULL || !transfers_[i].receives) continue;
    MPI_Cancel(&requests_[i]);
  }
  requests_.clear();
  transfers_.clear();
}

absl::Status MpiLane::Meet(const MpiCall& call) {
  return Gather(call, nullptr, nullptr, 0);
}

absl::Status MpiLane::Gather(const MpiCall& call, const void* mine, void* all, int64_t bytes) {
  constexpr int64_t kCardBytes = 256;
  auto* const out = static_cast<std::byte*>(all);
  std::byte* to = out;
  if (bytes <= kCardBytes && !fate_->dead()) {
    if (cards_.empty()) cards_.resize(size() * kCardBytes);
    to = cards_.data();
  }
  Begin(call);
  for (int i = 1; i < size(); ++i) {
    const int r = (rank_ + i) % size();
    Receive(r, to + r * bytes, bytes);
  }
  for (int i = 1; i < size(); ++i) Send((rank_ + i) % size(), mine, bytes);
  if (to + rank_ * bytes != mine && bytes > 0) {
    std::copy_n(static_cast<const std::byte*>(mine), bytes, to + rank_ * bytes);
  }
  MOE_RETURN_IF_ERROR(Finish());
  if (to != out && bytes > 0) std::copy_n(to, size() * bytes, out);
  return absl::OkStatus();
}

}  // namespace moe
