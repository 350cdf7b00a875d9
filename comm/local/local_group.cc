#include "comm/local/local_group.h"

#include <algorithm>
#include <optional>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <sched.h>

#include "comm/patience.h"
#include "comm/wait_report.h"
#include "kernels/base/caught.h"
#include "kernels/base/machine_limits.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

// Looks `times` times for a peer that runs on another core.
bool Spin(int times, absl::FunctionRef<bool()> look) {
  for (int i = 0; i < times; ++i) {
    if (look()) return true;
    Relax();
  }
  return false;
}

// Looks before a rank asks where its peers run, which takes what is in their caches: about 2 us.
constexpr int kSpinsUnseen = 64;

// Offers the core a few times: a peer that waits for this very core comes sooner than by a sleep
// and a wake-up.
bool OfferCore(absl::FunctionRef<bool()> look) {
  constexpr int kOffers = 4;
  for (int i = 0; i < kOffers; ++i) {
    std::this_thread::yield();
    if (look()) return true;
  }
  return false;
}

absl::Status CheckSameCollective(const LocalPost& mine, const LocalPost& other, int my_rank,
                                 int other_rank) {
  // Operation names are literals of one file, but equal literals need not share an address.
  if (absl::string_view(mine.operation) != other.operation) {
    return absl::InvalidArgumentError(absl::StrCat(mine.operation, ": rank ", other_rank, " is in ",
                                                   other.operation, ", expected the same on all"));
  }
  if (mine.count != other.count || mine.type != other.type || mine.op != other.op ||
      mine.root != other.root) {
    const auto text = [](const LocalPost& p) {
      return absl::StrCat(p.count, " x ", NameOf(p.type), p.op == ReduceOp::kMax ? ", max" : "",
                          ", root ", p.root);
    };
    return absl::InvalidArgumentError(absl::StrCat(mine.operation, ": rank ", my_rank, " has ",
                                                   text(mine), ", rank ", other_rank, " has ",
                                                   text(other), ", expected the same on all"));
  }
  return absl::OkStatus();
}

}  // namespace

void LocalFate::Kill(int world_rank, absl::Status reason) noexcept {
  std::lock_guard<std::mutex> lock(mu_);
  if (origin_ >= 0) {
    const auto keep = [&] {
      own_.emplace(world_rank, reason);
      return absl::OkStatus();
    };
    if (world_rank != origin_) Caught(keep).IgnoreError();
    return;
  }
  origin_ = world_rank;
  reason_ = std::move(reason);
  dead_.store(true, std::memory_order_seq_cst);
  for (Waiter* waiter : waiters_) waiter->WakeAll();
}

absl::Status LocalFate::StatusOf(int world_rank) noexcept {
  std::lock_guard<std::mutex> lock(mu_);
  if (world_rank == origin_ || origin_ < 0) return reason_;
  if (const auto known = own_.find(world_rank); known != own_.end()) return known->second;
  const absl::Status own = Caught([&] {
    const std::string text = absl::StrCat("rank ", world_rank, " was stopped by rank ", origin_,
                                          ": ", reason_.message());
    return own_
        .emplace(world_rank, absl::IsDeadlineExceeded(reason_) ? absl::DeadlineExceededError(text)
                                                               : absl::AbortedError(text))
        .first->second;
  });
  return absl::IsResourceExhausted(own) ? reason_ : own;
}

int LocalFate::origin() const {
  std::lock_guard<std::mutex> lock(mu_);
  return origin_;
}

void LocalFate::Add(Waiter* waiter) {
  std::lock_guard<std::mutex> lock(mu_);
  waiters_.push_back(waiter);
}

void LocalFate::Remove(Waiter* waiter) {
  std::lock_guard<std::mutex> lock(mu_);
  waiters_.erase(std::find(waiters_.begin(), waiters_.end(), waiter));
}

LocalGroup::LocalGroup(std::shared_ptr<LocalFate> fate, std::vector<int> members,
                       absl::Duration timeout, int cores)
    : fate_(std::move(fate)),
      members_(std::move(members)),
      timeout_(timeout),
      cores_(cores),
      may_spin_(size() <= cores_),
      posts_(members_.size()),
      begun_(members_.size()),
      finished_(members_.size()),
      host_posts_(members_.size()),
      mailboxes_(members_.size() * members_.size()),
      ranks_(members_.size()) {
  for (Meeting& meeting : meetings_) meeting.arrivals = std::vector<Counter>(members_.size());
  for (RankState& rank : ranks_) {
    rank.first.resize(members_.size());
    rank.blocked.resize(members_.size());
  }
  fate_->Add(this);
}

LocalGroup::~LocalGroup() {
  fate_->Remove(this);
}

int LocalGroup::Cores() {
  return UsableCpus();
}

void LocalGroup::WakeAll() {
  for (Meeting& meeting : meetings_) meeting.bell.Ring();
  for (RankState& rank : ranks_) rank.bell.Ring();
}

absl::Status LocalGroup::Fail(const LocalCaller& caller, absl::Status reason) {
  fate_->Kill(world_rank(caller.rank), std::move(reason));
  return fate_->StatusOf(world_rank(caller.rank));
}

absl::Status LocalGroup::Late(const LocalCaller& caller, const std::vector<int>& missing,
                              absl::Duration waited) {
  const std::string place = DescribePlace(world_rank(caller.rank), caller.operation, caller.site);
  return Fail(caller, LateError(place, missing, waited, timeout_ + caller.site.grace));
}

absl::Status LocalGroup::WaitUntil(Doorbell& bell, SpinBudget& spin, const LocalCaller& caller,
                                   absl::FunctionRef<bool()> done, absl::FunctionRef<bool()> early,
                                   absl::FunctionRef<bool(int)> is_missing) {
  std::optional<Patience> patience;  // bounds the time asleep; most waits end before
  Standing before;
  while (true) {
    const uint32_t seen = bell.count();
    if (done()) return absl::OkStatus();
    if (fate_->dead()) return fate_->StatusOf(world_rank(caller.rank));
    const auto look = [&] {
      return bell.count() != seen || early();
    };
    if (may_spin_) {
      const int spins = spin.Next();
      const int first = std::min(spins, kSpinsUnseen);
      const bool came =
          Spin(first, look) ||
          (spins > first && !SharesCore(caller.rank, is_missing) && Spin(spins - first, look));
      spin.Report(came);
      if (came) continue;
    }
    if (OfferCore(look)) continue;
    if (!patience.has_value()) {
      patience.emplace(timeout_ + caller.site.grace);
      before = Look(caller, is_missing);
    }
    if (bell.Sleep(seen, patience->NextLook(), early) || done()) continue;
    const Standing now = Look(caller, is_missing);
    if (!patience->IsOver(now != std::exchange(before, now)) || now.missing == 0) continue;
    std::vector<int> missing;
    for (int r = 0; r < size(); ++r) {
      if (is_missing(r)) missing.push_back(world_rank(r));
    }
    if (missing.empty()) continue;  // the last one came just now, and rings next
    return Late(caller, missing, patience->waited());
  }
}

bool LocalGroup::SharesCore(int rank, absl::FunctionRef<bool(int)> is_missing) const {
  const int core = sched_getcpu();
  for (int r = 0; r < size(); ++r) {
    const bool here = r != rank && ranks_[r].core.load(std::memory_order_relaxed) == core;
    if (here && is_missing(r)) return true;
  }
  return false;
}

LocalGroup::Standing LocalGroup::Look(const LocalCaller& caller,
                                      absl::FunctionRef<bool(int)> is_missing) const {
  Standing standing;
  for (int r = 0; r < size(); ++r) {
    const bool missing = is_missing(r);
    standing.missing += missing ? 1 : 0;
    if (missing || r == caller.rank) {
      standing.parts_done += ranks_[r].parts_done.load(std::memory_order_relaxed);
    }
  }
  return standing;
}

bool LocalGroup::HaveAll(const std::vector<Counter>& counters, uint64_t count) {
  return std::all_of(counters.begin(), counters.end(), [&](const Counter& counter) {
    return counter.count.load(std::memory_order_seq_cst) >= count;
  });
}

absl::Status LocalGroup::AwaitAll(Lane lane, const LocalCaller& caller,
                                  const std::vector<Counter>& counters, uint64_t count, int most) {
  const auto is_missing = [&](int r) {
    return counters[r].count.load(std::memory_order_seq_cst) < count;
  };
  const auto all_here = [&] {
    return HaveAll(counters, count);
  };
  Doorbell& bell = meetings_[lane].bell;
  if (all_here()) {
    bell.RingSleepers(most);
    return absl::OkStatus();
  }
  return WaitUntil(bell, ranks_[caller.rank].meeting_spin[lane], caller, all_here, all_here,
                   is_missing);
}

absl::Status LocalGroup::Meet(Lane lane, const LocalCaller& caller, int most) {
  if (fate_->dead()) return fate_->StatusOf(world_rank(caller.rank));
  std::vector<Counter>& arrivals = meetings_[lane].arrivals;
  std::atomic<uint64_t>& mine = arrivals[caller.rank].count;
  const uint64_t round = mine.load(std::memory_order_relaxed) + 1;
  ranks_[caller.rank].core.store(sched_getcpu(), std::memory_order_relaxed);
  // In the one order of all sequentially consistent operations, the last rank to store sees the
  // stores of all others and the ranks that sleep; a rank that goes to sleep after that sees the
  // store.
  mine.store(round, std::memory_order_seq_cst);
  return AwaitAll(lane, caller, arrivals, round, most);
}

LocalGroup::Inside::Inside(LocalGroup& group, const LocalCaller& caller)
    : inside_(group.ranks_[caller.rank].inside) {
  inside_.fetch_add(1, std::memory_order_seq_cst);
  if (group.fate_->dead()) status_ = group.fate_->StatusOf(group.world_rank(caller.rank));
}

// A rank that is inside only copies, so the wait ends soon; the order here (dead_, then inside)
// against that of Inside (inside, then dead_) leaves no rank unseen.
absl::Status LocalGroup::Shown(const LocalCaller& caller, absl::FunctionRef<absl::Status()> call) {
  absl::Status status = Caught(call);
  if (status.ok()) return status;
  // Everyone may see the same disagreement: each rank reports what it saw itself.
  status = Fail(caller, std::move(status));
  for (const RankState& rank : ranks_) {
    while (rank.inside.load(std::memory_order_seq_cst) != 0) std::this_thread::yield();
  }
  return status;
}

// Until the work is finished, no rank leaves the collective: posts stay as they are, and `owner`,
// asleep or not, keeps what its work uses.
absl::Status LocalGroup::RunWork(int owner, uint64_t number) {
  uint64_t before = number - 1;
  if (!begun_[owner].count.compare_exchange_strong(before, number, std::memory_order_relaxed)) {
    return absl::OkStatus();
  }
  const LocalPost& post = posts_[owner];
  for (int r = 0; r < size(); ++r) {
    MOE_RETURN_IF_ERROR(CheckSameCollective(post, posts_[r], world_rank(owner), world_rank(r)));
  }
  MOE_RETURN_IF_ERROR((*post.work)(posts_));
  finished_[owner].count.store(number, std::memory_order_seq_cst);
  return absl::OkStatus();
}

// Calls run(r) for every rank, first for those that arrived from this core.
absl::Status LocalGroup::ForOthers(absl::FunctionRef<absl::Status(int)> run) const {
  const int core = sched_getcpu();
  for (const bool near : {true, false}) {
    for (int r = 0; r < size(); ++r) {
      const int other = ranks_[r].core.load(std::memory_order_relaxed);
      if ((other == core) == near) MOE_RETURN_IF_ERROR(run(r));
    }
  }
  return absl::OkStatus();
}

absl::Status LocalGroup::Collective(const LocalCaller& caller, LocalPost post, LocalWork work) {
  if (fate_->dead()) return fate_->StatusOf(world_rank(caller.rank));
  post.work = &work;
  return Shown(caller, [&]() -> absl::Status {
    const uint64_t number = ++ranks_[caller.rank].collectives;
    posts_[caller.rank] = post;
    MOE_RETURN_IF_ERROR(Meet(kStreamLane, caller, may_spin_ ? INT_MAX : cores_ - 1));
    {
      const Inside inside(*this, caller);
      const auto run = [&](int owner) {
        absl::Status status = Caught([&] { return RunWork(owner, number); });
        if (status.ok()) return status;
        fate_->Kill(world_rank(owner), std::move(status));
        return fate_->StatusOf(world_rank(caller.rank));
      };
      if (inside.status().ok()) {
        MOE_RETURN_IF_ERROR(run(caller.rank));
        if (!may_spin_) MOE_RETURN_IF_ERROR(ForOthers(run));
      } else if (!HaveAll(finished_, number)) {  // else it died when this was over
        return inside.status();
      }
    }
    const int64_t done_ns = MonotonicNs();
    MOE_RETURN_IF_ERROR(AwaitAll(kStreamLane, caller, finished_, number, INT_MAX));
    ranks_[caller.rank].lingered_ns += MonotonicNs() - done_ns;
    return absl::OkStatus();
  });
}

absl::Status LocalGroup::HostExchange(const LocalCaller& caller, void* value,
                                      absl::FunctionRef<void(absl::Span<void* const>)> work) {
  if (fate_->dead()) return fate_->StatusOf(world_rank(caller.rank));
  return Shown(caller, [&]() -> absl::Status {
    host_posts_[caller.rank] = value;
    MOE_RETURN_IF_ERROR(Meet(kHostLane, caller));
    {
      const Inside inside(*this, caller);
      MOE_RETURN_IF_ERROR(inside.status());
      work(host_posts_);
    }
    return Meet(kHostLane, caller);
  });
}

void LocalGroup::PostSends(const LocalCaller& caller, absl::Span<const SendRecvOp> ops) {
  RankState& self = ranks_[caller.rank];
  self.sends.clear();
  self.sends.reserve(ops.size());  // pointers into it must stay valid
  std::fill(self.first.begin(), self.first.end(), nullptr);
  // Backwards, so that each send can link to the next one with the same peer.
  for (auto op = ops.rbegin(); op != ops.rend(); ++op) {
    if (op->send == nullptr) continue;
    LocalSend*& first = self.first[op->peer];
    self.sends.push_back({static_cast<const std::byte*>(op->send), op->bytes, first});
    first = &self.sends.back();
  }
  for (int peer = 0; peer < size(); ++peer) {
    if (self.first[peer] == nullptr) continue;
    mailbox(caller.rank, peer).first.store(self.first[peer], std::memory_order_release);
    ranks_[peer].bell.Ring();
  }
}

absl::Status LocalGroup::TakeWhatCame(const LocalCaller& caller, absl::Span<const SendRecvOp> ops) {
  RankState& self = ranks_[caller.rank];
  std::fill(self.blocked.begin(), self.blocked.end(), 0);
  for (size_t i = 0; i < ops.size(); ++i) {
    const int peer = ops[i].peer;
    if (self.taken[i] || self.blocked[peer]) continue;
    Mailbox& box = mailbox(peer, caller.rank);
    LocalSend* const send = box.first.load(std::memory_order_acquire);
    if (send == nullptr) {
      self.blocked[peer] = 1;  // later receives from this peer must not overtake this one
      continue;
    }
    if (send->bytes != ops[i].bytes) {
      return OtherSizeError("SendRecv", world_rank(caller.rank), ops[i].bytes, world_rank(peer),
                            send->bytes);
    }
    {
      const Inside inside(*this, caller);
      MOE_RETURN_IF_ERROR(inside.status());
      CopyInParts(*this, caller, ops[i].recv, send->data, send->bytes);
    }
    self.taken[i] = 1;
    // After this the sender may return: `send` is gone.
    box.first.store(send->next, std::memory_order_release);
    ranks_[peer].bell.Ring();
  }
  return absl::OkStatus();
}

absl::Status LocalGroup::SendRecv(const LocalCaller& caller, absl::Span<const SendRecvOp> ops) {
  if (fate_->dead()) return fate_->StatusOf(world_rank(caller.rank));
  RankState& self = ranks_[caller.rank];
  const auto owes_me = [&](int r) {
    for (size_t i = 0; i < ops.size(); ++i) {
      if (!self.taken[i] && ops[i].peer == r) return true;
    }
    return false;
  };
  const auto has_mine = [&](int r) {
    return mailbox(caller.rank, r).first.load(std::memory_order_acquire) != nullptr;
  };
  const auto is_missing = [&](int r) {
    return owes_me(r) || has_mine(r);
  };
  absl::Status failed;
  const auto done = [&] {
    failed = TakeWhatCame(caller, ops);
    if (!failed.ok()) return true;
    for (int r = 0; r < size(); ++r) {
      if (is_missing(r)) return false;
    }
    return true;
  };
  const auto bell_alone = [] {
    return false;  // whatever comes rings it
  };
  return Shown(caller, [&]() -> absl::Status {
    self.taken.assign(ops.size(), 0);
    for (size_t i = 0; i < ops.size(); ++i) self.taken[i] = ops[i].send != nullptr ? 1 : 0;
    self.core.store(sched_getcpu(), std::memory_order_relaxed);
    PostSends(caller, ops);
    MOE_RETURN_IF_ERROR(WaitUntil(self.bell, self.spin, caller, done, bell_alone, is_missing));
    return failed;
  });
}

}  // namespace moe
