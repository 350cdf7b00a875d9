#include "comm/create.h"

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <unistd.h>

#include "comm/hosts.h"
#include "comm/local/local_group.h"
#include "comm/mpi/mpi_run.h"
#include "comm/nccl/nccl_store.h"
#include "comm/nccl/nccl_world.h"
#include "comm/patience.h"
#include "kernels/base/caught.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// `status` with the message that words() makes, if there is memory for it.
absl::Status Reworded(const absl::Status& status, absl::FunctionRef<std::string()> words) {
  const absl::Status longer = Caught([&] { return absl::Status(status.code(), words()); });
  return longer.code() == status.code() ? longer : status;
}

// The exception that is being handled, with the rank's name.
absl::Status StatusOfRank(int rank) {
  const absl::Status status = StatusOfException();
  return Reworded(status, [&] { return absl::StrCat("rank ", rank, ": ", status.message()); });
}

// What a rank's work returns, or its exception with the rank's name.
absl::Status Guarded(int rank, absl::FunctionRef<absl::Status()> run) {
  try {
    return run();
  } catch (...) {
    return StatusOfRank(rank);
  }
}

// The communicator of a thread's rank.
using MakeRank = absl::FunctionRef<absl::StatusOr<std::unique_ptr<Communicator>>(int rank)>;

// What has become of the threads of a process.
class Returns final : private LocalFate::Waiter {
 public:
  Returns(int ranks, LocalFate& fate) : fate_(fate), results_(ranks) { fate_.Add(this); }
  ~Returns() { fate_.Remove(this); }
  Returns(const Returns&) = delete;
  Returns& operator=(const Returns&) = delete;

  void Set(int rank, absl::Status result) noexcept {
    const std::lock_guard<std::mutex> lock(mu_);
    results_[rank] = std::move(result);
    changed_.notify_all();
  }
  // The result of a rank that has returned.
  std::optional<absl::Status> Of(int rank) const {
    const std::lock_guard<std::mutex> lock(mu_);
    return results_[rank];
  }
  std::vector<int> Missing() const {
    const std::lock_guard<std::mutex> lock(mu_);
    std::vector<int> missing;
    for (size_t rank = 0; rank < results_.size(); ++rank) {
      if (!results_[rank].has_value()) missing.push_back(static_cast<int>(rank));
    }
    return missing;
  }
  // Returns when the world has ended, or all ranks have returned. The rank that ends the world may
  // return much later: one over NCCL aborts its communicators first.
  void AwaitEndOrAll() const {
    std::unique_lock<std::mutex> lock(mu_);
    changed_.wait(lock, [this] { return fate_.dead() || AllAreBack(); });
  }
  bool AwaitAll(absl::Duration longest) const {
    Patience patience(longest);
    std::unique_lock<std::mutex> lock(mu_);
    while (!changed_.wait_until(lock, patience.NextLook(), [this] { return AllAreBack(); })) {
      if (patience.IsOver(false)) return false;
    }
    return true;
  }

 private:
  void WakeAll() override {
    const std::lock_guard<std::mutex> lock(mu_);  // after a wait's look at the fate, or before it
    changed_.notify_all();
  }
  bool AllAreBack() const {
    return std::all_of(results_.begin(), results_.end(),
                       [](const auto& result) { return result.has_value(); });
  }

  LocalFate& fate_;
  mutable std::mutex mu_;
  mutable std::condition_variable changed_;
  std::vector<std::optional<absl::Status>> results_;  // guarded by mu_
};

// Nothing ends a thread that hangs, so the process leaves; not even for its line and its dump it
// waits long, for the thread may hang in writing to the same pipe or disk.
[[noreturn]] void LeaveThreads(const RunOptions& options, LocalFate& fate, const absl::Status& why,
                               const Returns& returns) noexcept {
  const absl::Status said = Reworded(why, [&] {
    const std::vector<int> missing = returns.Missing();
    return absl::StrCat(why.message(), "; ", missing.size() == 1 ? "rank " : "ranks ",
                        absl::StrJoin(missing, ", "), " did not return, and ",
                        missing.size() == 1 ? "was" : "were", " left");
  });
  Returns reported(1, fate);
  const auto report = [&] {
    Caught([&] {
      if (options.report) options.report(said);
      return absl::OkStatus();
    }).IgnoreError();
    if (options.watch != nullptr) options.watch->Dump(why.message());
    reported.Set(0, absl::OkStatus());
  };
  try {
    std::thread(report).detach();
  } catch (const std::exception&) {  // the system has no more threads
    report();
  }
  (void)reported.AwaitAll(options.grace / 2);
  _exit(options.exit_code(why));
}

// Returns when all have returned; leaves the process where that would take for ever.
void AwaitThreads(const RunOptions& options, LocalFate& fate, const Returns& returns) noexcept {
  returns.AwaitEndOrAll();
  const int first = fate.origin();
  if (first < 0 || !options.exit_code) return;
  absl::Status why = returns.Of(first).value_or(absl::OkStatus());
  if (why.ok()) why = fate.StatusOf(first);  // has not returned, or with OK
  const bool late = absl::IsDeadlineExceeded(why);
  if (returns.AwaitAll(options.grace / 2 + (late ? absl::ZeroDuration() : options.timeout))) return;
  LeaveThreads(options, fate, why, returns);
}

// `body` on threads, whose world `fate` ends when one fails.
absl::Status RunThreads(const RunOptions& options, LocalFate& fate, MakeRank make, RankBody body) {
  const int ranks = options.plan.ranks;
  const auto run_rank = [&](int rank) {
    return Guarded(rank, [&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> world, make(rank));
      return body(std::move(world));
    });
  };
  if (ranks == 1) return run_rank(0);
  Returns returns(ranks, fate);
  const auto run = [&](int rank) noexcept {
    const absl::Status result = run_rank(rank);
    returns.Set(rank, result);  // before the world ends, for AwaitThreads to find
    if (!result.ok()) {
      fate.Kill(
          rank, Caught([&] {
            return absl::AbortedError(absl::StrCat("rank ", rank, " failed: ", result.message()));
          }));
    }
  };
  std::vector<std::thread> threads;
  threads.reserve(static_cast<size_t>(ranks));
  absl::Status started;
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      threads.emplace_back(run, rank);
    } catch (...) {
      started = StatusOfRank(rank);
      for (int absent = rank; absent < ranks; ++absent) returns.Set(absent, started);
      fate.Kill(rank, started);
      break;
    }
  }
  AwaitThreads(options, fate, returns);
  for (std::thread& thread : threads) thread.join();
  MOE_RETURN_IF_ERROR(started);
  const int first = fate.origin();
  if (first >= 0) MOE_RETURN_IF_ERROR(*returns.Of(first));
  for (int rank = 0; rank < ranks; ++rank) MOE_RETURN_IF_ERROR(*returns.Of(rank));
  return absl::OkStatus();
}

absl::Status RunLocalThreads(const RunOptions& options, RankBody body) {
  const auto fate = std::make_shared<LocalFate>();
  auto world =
      MakeLocalWorld({.ranks = options.plan.ranks, .timeout = options.timeout, .fate = fate});
  return RunThreads(
      options, *fate,
      [&](int rank) -> absl::StatusOr<std::unique_ptr<Communicator>> {
        return std::move(world[rank]);
      },
      body);
}

absl::Status RunNcclThreads(const RunOptions& options, RankBody body) {
  MOE_ASSIGN_OR_RETURN(const NcclId id, MakeNcclId());
  const auto fate = std::make_shared<LocalFate>();
  return RunThreads(
      options, *fate,
      [&](int rank) {
        return MakeNcclCommunicator({.id = id,
                                     .rank = rank,
                                     .size = options.plan.ranks,
                                     .device = rank,
                                     .timeout = options.timeout,
                                     .join_timeout = StartTimeout(options),
                                     .fate = fate});
      },
      body);
}

// The GPU of this process: processes of a host take them in turn.
absl::StatusOr<int> GpuOf(Communicator& meeting) {
  MOE_ASSIGN_OR_RETURN(const int gpus, CudaDeviceCount());
  const auto stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const auto hosts, HostsOf(HostId(), meeting, *stream));
  const auto own = hosts.begin() + meeting.rank();
  const auto before = std::count(hosts.begin(), own, *own);
  return static_cast<int>(before) % gpus;
}

absl::Status RunNcclRankOverMpi(const RunOptions& options, RankBody body) {
  return RunMpiRank(options, [&](std::unique_ptr<Communicator> meeting) {
    return Guarded(meeting->rank(), [&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(const int gpu, GpuOf(*meeting));
      MOE_ASSIGN_OR_RETURN(auto world,
                           JoinNcclOver(*meeting, {.device = gpu,
                                                   .timeout = options.timeout,
                                                   .join_timeout = StartTimeout(options)}));
      return body(std::move(world));
    });
  });
}

// The port after MASTER_PORT, where torchrun's own store listens.
constexpr int kPortsAfterMaster = 1;

absl::Status RunNcclRankOverTcp(const RunOptions& options, RankBody body) {
  const LaunchInfo& launch = options.plan.launch;
  const auto run = [&]() -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const int gpus, CudaDeviceCount());
    MOE_ASSIGN_OR_RETURN(auto world, JoinNcclByTcp({.rank = launch.rank,
                                                    .size = launch.size,
                                                    .device = launch.local_rank % gpus,
                                                    .timeout = options.timeout,
                                                    .join_timeout = StartTimeout(options)},
                                                   {.host = launch.address,
                                                    .port = launch.port + kPortsAfterMaster,
                                                    .secret = options.secret}));
    return body(std::move(world));
  };
  const absl::Status status = Guarded(launch.rank, run);
  if (status.ok() || launch.size == 1) return status;
  if (options.report) options.report(status);
  _exit(options.exit_code ? options.exit_code(status) : 1);
}

// `body`, whose rank `watch` sees, and its dump where that fails.
absl::Status RunWatched(ProcessWatch& watch, std::unique_ptr<Communicator> world, RankBody body) {
  world->Attach(watch.Of(world->rank(), world->size()), "world");
  try {
    absl::Status status = body(std::move(world));
    if (!status.ok()) watch.Dump(status.message());
    return status;
  } catch (...) {
    watch.Dump(StatusOfException().message());
    throw;
  }
}

}  // namespace

absl::Status OrAbort(Communicator& world, absl::Status status) {
  if (!status.ok()) world.Abort(status);
  return status;
}

absl::Status RunRanks(const RunOptions& options, RankBody given) {
  const auto watched = [&](std::unique_ptr<Communicator> world) {
    return RunWatched(*options.watch, std::move(world), given);
  };
  const RankBody body = options.watch == nullptr ? given : RankBody(watched);
  const WorldPlan& plan = options.plan;
  if (!plan.processes() && plan.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("RunRanks: ", plan.ranks, " ranks, expected >= 1"));
  }
  const bool nccl = plan.backend == Backend::kNccl;
  if (nccl) PrepareForNccl();
  if (!plan.processes()) {
    return nccl ? RunNcclThreads(options, body) : RunLocalThreads(options, body);
  }
  if (plan.meeting == Meeting::kTcp) return RunNcclRankOverTcp(options, body);
  if (nccl) return RunNcclRankOverMpi(options, body);
  return RunMpiRank(options, [&](std::unique_ptr<Communicator> world) {
    const int rank = world->rank();
    return Guarded(rank, [&] { return body(std::move(world)); });
  });
}

}  // namespace moe
