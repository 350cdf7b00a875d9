#include "comm/create.h"

#include <algorithm>
#include <exception>
#include <memory>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>
#include <unistd.h>

#include "comm/clock_offset.h"
#include "comm/local/local_group.h"
#include "comm/mpi/mpi_run.h"
#include "comm/nccl/nccl_join.h"
#include "comm/nccl/nccl_store.h"
#include "comm/nccl/nccl_world.h"
#include "kernels/base/cuda_devices.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status Guarded(absl::FunctionRef<absl::Status()> run) {
  try {
    return run();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("RunRanks: out of memory");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("RunRanks: exception: ", e.what()));
  }
}

// The communicator of a thread's rank.
using MakeRank = absl::FunctionRef<absl::StatusOr<std::unique_ptr<Communicator>>(int rank)>;

// `body` on `ranks` threads, whose world `fate` ends when one fails.
absl::Status RunThreads(int ranks, LocalFate& fate, MakeRank make, RankBody body) {
  const auto run_rank = [&](int rank) {
    return Guarded([&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> world, make(rank));
      return body(std::move(world));
    });
  };
  if (ranks == 1) return run_rank(0);
  std::vector<absl::Status> results(ranks);
  const auto run = [&](int rank) {
    results[rank] = run_rank(rank);
    if (results[rank].ok()) return;
    fate.Kill(rank, absl::AbortedError(
                        absl::StrCat("rank ", rank, " failed: ", results[rank].message())));
  };
  std::vector<std::thread> threads;
  absl::Status started;
  for (int rank = 0; rank < ranks; ++rank) {
    try {
      threads.emplace_back(run, rank);
    } catch (const std::exception& e) {  // the system has no more threads
      started = absl::ResourceExhaustedError(
          absl::StrCat("RunRanks: thread ", rank, " of ", ranks, " does not start: ", e.what()));
      fate.Kill(rank, started);
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  MOE_RETURN_IF_ERROR(started);
  const int first = fate.origin();
  if (first >= 0 && !results[first].ok()) return results[first];
  for (const absl::Status& result : results) MOE_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::Status RunLocalThreads(const RunOptions& options, RankBody body) {
  WatchedLocalWorld world =
      MakeWatchedLocalWorld({.ranks = options.plan.ranks, .timeout = options.timeout});
  return RunThreads(
      options.plan.ranks, *world.fate,
      [&](int rank) -> absl::StatusOr<std::unique_ptr<Communicator>> {
        return std::move(world.ranks[rank]);
      },
      body);
}

absl::Status RunNcclThreads(const RunOptions& options, RankBody body) {
  MOE_ASSIGN_OR_RETURN(const NcclId id, MakeNcclId());
  const auto fate = std::make_shared<LocalFate>();
  return RunThreads(
      options.plan.ranks, *fate,
      [&](int rank) {
        return MakeNcclCommunicator({.id = id,
                                     .rank = rank,
                                     .size = options.plan.ranks,
                                     .device = rank,
                                     .timeout = options.timeout,
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
    return Guarded([&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(const int gpu, GpuOf(*meeting));
      MOE_ASSIGN_OR_RETURN(auto world,
                           JoinNcclOver(*meeting, {.device = gpu, .timeout = options.timeout}));
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
                                                    .timeout = options.timeout},
                                                   {.host = launch.address,
                                                    .port = launch.port + kPortsAfterMaster,
                                                    .secret = options.secret}));
    return body(std::move(world));
  };
  const absl::Status status = Guarded(run);
  if (status.ok() || launch.size == 1) return status;
  if (options.report) options.report(status);
  _exit(options.exit_code ? options.exit_code(status) : 1);
}

}  // namespace

absl::Status OrAbort(Communicator& world, absl::Status status) {
  if (!status.ok()) world.Abort(status);
  return status;
}

absl::Status RunRanks(const RunOptions& options, RankBody body) {
  const WorldPlan& plan = options.plan;
  if (!plan.processes() && plan.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("RunRanks: ", plan.ranks, " ranks, expected >= 1"));
  }
  const bool nccl = plan.backend == Backend::kNccl;
  if (!plan.processes()) {
    return nccl ? RunNcclThreads(options, body) : RunLocalThreads(options, body);
  }
  if (plan.meeting == Meeting::kTcp) return RunNcclRankOverTcp(options, body);
  if (nccl) return RunNcclRankOverMpi(options, body);
  return RunMpiRank(options, [&](std::unique_ptr<Communicator> world) {
    return Guarded([&] { return body(std::move(world)); });
  });
}

}  // namespace moe
