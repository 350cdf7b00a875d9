#include "comm/nccl/nccl_store.h"

#include <algorithm>
#include <cerrno>
#include <list>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/time/clock.h>

#include "comm/nccl/nccl_address.h"
#include "comm/nccl/nccl_auth.h"
#include "comm/wait_report.h"
#include "kernels/base/log.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

constexpr size_t kShortestSecret = 16;
constexpr size_t kLongestSecret = 256;
constexpr absl::Duration kPatience = absl::Seconds(3);  // for a connection that sends nothing
constexpr absl::Duration kShortestNap = absl::Milliseconds(5);
constexpr absl::Duration kLongestNap = absl::Milliseconds(250);
constexpr size_t kMostPeers = 256;  // a quarter of what a process may usually open
constexpr int kMostWarnings = 16;   // strangers do not fill the log

absl::Duration JoinTimeout(const NcclRankOptions& options) {
  return options.join_timeout.value_or(options.timeout);
}

absl::Status LateAt(const NcclRankOptions& options, const std::vector<int>& missing,
                    absl::Duration waited, absl::string_view detail) {
  const absl::Status late = LateError(DescribePlace(options.rank, "joining NCCL", {}), missing,
                                      waited, JoinTimeout(options));
  return absl::DeadlineExceededError(absl::StrCat(late.message(), ": ", detail));
}

// Rank 0's side. One thread serves all connections: a silent one does not hold up the others.
class IdServer {
 public:
  IdServer(const NcclRankOptions& options, const NcclStore& store, const NcclAnnouncement& said,
           Descriptor listener)
      : options_(options),
        store_(store),
        said_(said),
        listener_(std::move(listener)),
        came_(static_cast<size_t>(options.size)) {
    came_[0] = true;
  }

  // Serves until all ranks have come, or the deadline has passed.
  absl::Status Run();

 private:
  struct Peer {
    Descriptor socket;
    StoreSession session;
    SteadyTime deadline;
    StoreClaim claim;
    size_t received_bytes = 0;  // received bytes of the claim
  };

  std::vector<int> Missing() const;
  absl::Status Accept();
  // False when nothing more is to be expected of this connection.
  bool Hear(Peer& peer);
  void Answer(const Peer& peer);
  absl::Status Check(const Peer& peer) const;
  void Warn(absl::string_view what);

  const NcclRankOptions& options_;
  const NcclStore& store_;
  const NcclAnnouncement said_;
  const Descriptor listener_;
  std::list<Peer> peers_;  // the oldest first
  std::vector<bool> came_;
  int warnings_ = 0;
};

absl::Status IdServer::Run() {
  Patience patience(JoinTimeout(options_));
  std::vector<pollfd> ready;
  for (std::vector<int> missing = Missing(); !missing.empty(); missing = Missing()) {
    const SteadyTime now = Patience::Clock::now();
    if (patience.IsOver(false, now)) {
      return LateAt(options_, missing, patience.waited(),
                    absl::StrCat("listening on ", store_.host, " port ", store_.port));
    }
    peers_.remove_if([now](const Peer& peer) { return peer.deadline <= now; });
    ready.assign(1, {.fd = listener_.number(), .events = POLLIN, .revents = 0});
    for (const Peer& peer : peers_) {
      ready.push_back({.fd = peer.socket.number(), .events = POLLIN, .revents = 0});
    }
    const SteadyTime look = patience.NextLook();
    WaitFor(absl::MakeSpan(ready), peers_.empty() ? look : std::min(look, peers_.front().deadline));
    auto of_peer = ready.begin();
    peers_.remove_if([&](Peer& peer) { return (++of_peer)->revents != 0 && !Hear(peer); });
    if (ready.front().revents != 0) MOE_RETURN_IF_ERROR(Accept());
  }
  return absl::OkStatus();
}

std::vector<int> IdServer::Missing() const {
  std::vector<int> missing;
  for (int rank = 0; rank < options_.size; ++rank) {
    if (!came_[rank]) missing.push_back(rank);
  }
  return missing;
}

absl::Status IdServer::Accept() {
  Peer peer;
  peer.socket = AcceptFrom(listener_);
  const int error = errno;
  const bool full = !peer.socket.is_open() &&
                    (error == EMFILE || error == ENFILE || error == ENOBUFS || error == ENOMEM);
  // A rank sends its claim at once: the connection that has been silent for longest is the least
  // likely to be a rank.
  if ((full || peers_.size() == kMostPeers) && !peers_.empty()) peers_.pop_front();
  if (full) absl::SleepFor(kShortestNap);  // unless it was ours there is nothing to free
  if (!peer.socket.is_open()) return absl::OkStatus();
  peer.deadline = SteadyIn(kPatience);
  peer.session = {.secret = store_.secret, .place = ToString(NearEnd(peer.socket))};
  MOE_ASSIGN_OR_RETURN(peer.session.greeting, MakeGreeting());
  if (Send(peer.socket, BytesOf(peer.session.greeting)).ok()) peers_.push_back(std::move(peer));
  return absl::OkStatus();
}

bool IdServer::Hear(Peer& peer) {
  const absl::StatusOr<size_t> more =
      ReceiveSome(peer.socket, RoomOf(peer.claim).subspan(peer.received_bytes));
  if (!more.ok()) return false;
  peer.received_bytes += *more;
  if (peer.received_bytes < sizeof(StoreClaim)) return true;
  Answer(peer);
  return false;
}

void IdServer::Answer(const Peer& peer) {
  const StoreClaim& claim = peer.claim;
  if (!IsProven(peer.session, claim)) {
    Warn(absl::StrCat("JoinNcclByTcp: rank 0 refused ", ToString(FarEnd(peer.socket)),
                      ", which has another secret"));
    (void)Send(peer.socket, BytesOf(StoreAnswer{}));  // without a proof, which it could try keys on
    return;
  }
  const absl::Status refused = Check(peer);
  const absl::StatusOr<StoreAnswer> answer =
      MakeAnswer(peer.session, claim, refused.ok() ? said_ : Announce(refused));
  const bool told = answer.ok() && Send(peer.socket, BytesOf(*answer)).ok();
  if (!refused.ok()) {
    Warn(refused.message());
  } else if (told) {
    came_[claim.rank] = true;
  }
}

absl::Status IdServer::Check(const Peer& peer) const {
  const StoreClaim& claim = peer.claim;
  const std::string who = absl::StrCat("JoinNcclByTcp: rank 0 refused rank ", claim.rank, " of ",
                                       claim.size, " at ", ToString(FarEnd(peer.socket)));
  if (claim.size != options_.size) {
    return absl::InvalidArgumentError(absl::StrCat(who, ", expected ", options_.size, " ranks"));
  }
  if (claim.rank < 0 || claim.rank >= options_.size) {
    return absl::InvalidArgumentError(absl::StrCat(who, ", expected 0 <= rank < size"));
  }
  if (!came_[claim.rank]) return absl::OkStatus();
  return absl::AlreadyExistsError(absl::StrCat(who, ": a rank of this number has joined already"));
}

void IdServer::Warn(absl::string_view what) {
  if (++warnings_ > kMostWarnings) return;
  Log(LogLevel::kWarning,
      absl::StrCat(what, warnings_ == kMostWarnings ? "; further ones are not logged" : ""));
}

absl::StatusOr<NcclId> HandOutId(const NcclRankOptions& options, const NcclStore& store,
                                 const std::vector<SocketAddress>& addresses) {
  MOE_ASSIGN_OR_RETURN(Descriptor listener, ListenOn(addresses));
  const absl::StatusOr<NcclId> made = MakeNcclId();
  const absl::Status served = IdServer(options, store, Announce(made), std::move(listener)).Run();
  MOE_RETURN_IF_ERROR(made.status());
  MOE_RETURN_IF_ERROR(served);
  return made;
}

// kUnavailable: another try may have more luck.
absl::StatusOr<NcclAnnouncement> Ask(const NcclRankOptions& options, const NcclStore& store,
                                     const SocketAddress& address, Patience& patience) {
  const SteadyTime soon = SteadyIn(kPatience);
  MOE_ASSIGN_OR_RETURN(const Descriptor socket, ConnectTo(address, patience, soon));
  StoreSession session = {.secret = store.secret, .place = ToString(FarEnd(socket))};
  MOE_RETURN_IF_ERROR(Receive(socket, RoomOf(session.greeting), patience, soon));
  if (!IsGreeting(session.greeting)) {
    return absl::UnavailableError(
        absl::StrCat("who listens on ", ToString(address), " is no rank 0"));
  }
  MOE_ASSIGN_OR_RETURN(const StoreClaim claim, MakeClaim(session, options.rank, options.size));
  MOE_RETURN_IF_ERROR(Send(socket, BytesOf(claim)));
  StoreAnswer answer;
  // The claim is not sent again while it may yet be answered: a rank that claims twice is refused.
  MOE_RETURN_IF_ERROR(Receive(socket, RoomOf(answer), patience));
  if (IsProven(session, claim, answer)) return answer.said;
  return absl::UnauthenticatedError(
      absl::StrCat("JoinNcclByTcp: rank 0 at ", ToString(address),
                   " has another secret, expected the same on all ranks"));
}

absl::StatusOr<NcclId> FetchId(const NcclRankOptions& options, const NcclStore& store,
                               const std::vector<SocketAddress>& addresses) {
  Patience patience(JoinTimeout(options));
  absl::Status why;  // error of the last try that the deadline did not cut short, if there is one
  for (absl::Duration nap = kShortestNap;; nap = std::min(2 * nap, kLongestNap)) {
    for (const SocketAddress& address : addresses) {
      const absl::StatusOr<NcclAnnouncement> said = Ask(options, store, address, patience);
      if (said.ok()) return IdOf(*said);
      if (!absl::IsUnavailable(said.status())) return said.status();
      const bool is_over = patience.IsOver(false);
      if (!is_over || why.ok()) why = said.status();
      if (!is_over) continue;
      return LateAt(options, {0}, patience.waited(),
                    absl::StrCat(store.host, " port ", store.port, ": ", why.message()));
    }
    absl::SleepFor(std::min(nap, patience.step()));
  }
}

absl::Status Check(const NcclStore& store) {
  if (store.host.empty() || store.port < 1 || store.port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("JoinNcclByTcp: host '", store.host,
                                                   "' and port ", store.port,
                                                   ", expected a host and 1 to 65535"));
  }
  if (store.secret.size() < kShortestSecret || store.secret.size() > kLongestSecret) {
    return absl::InvalidArgumentError(absl::StrCat("JoinNcclByTcp: a secret of ",
                                                   store.secret.size(), " bytes, expected ",
                                                   kShortestSecret, " to ", kLongestSecret));
  }
  return absl::OkStatus();
}

absl::StatusOr<NcclId> Meet(const NcclRankOptions& options, const NcclStore& store) {
  MOE_RETURN_IF_ERROR(Check(store));
  MOE_ASSIGN_OR_RETURN(const std::vector<SocketAddress> addresses, Resolve(store.host, store.port));
  return options.rank == 0 ? HandOutId(options, store, addresses)
                           : FetchId(options, store, addresses);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclOver(Communicator& meeting,
                                                           NcclRankOptions options) {
  NcclAnnouncement said;
  if (meeting.rank() == 0) said = Announce(MakeNcclId());
  const auto stream = MakeInlineStream();
  MOE_RETURN_IF_ERROR(
      meeting.Broadcast<uint8_t>({reinterpret_cast<uint8_t*>(&said), sizeof(said)}, 0, *stream));
  MOE_RETURN_IF_ERROR(stream->Synchronize());
  MOE_ASSIGN_OR_RETURN(options.id, IdOf(said));
  options.rank = meeting.rank();
  options.size = meeting.size();
  return MakeNcclCommunicator(options);
}

absl::StatusOr<std::unique_ptr<Communicator>> JoinNcclByTcp(NcclRankOptions options,
                                                            const NcclStore& store) {
  if (options.rank < 0 || options.rank >= options.size) return MakeNcclCommunicator(options);
  MOE_ASSIGN_OR_RETURN(options.id, Meet(options, store));
  return MakeNcclCommunicator(options);
}

}  // namespace moe
