#include "comm/create.h"

#include <exception>
#include <new>
#include <thread>
#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/local/local_group.h"
#include "comm/mpi/mpi_run.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

absl::Status RunGuarded(RankBody body, std::unique_ptr<Communicator> world) {
  try {
    return body(std::move(world));
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError("RunRanks: out of memory");
  } catch (const std::exception& e) {
    return absl::InternalError(absl::StrCat("RunRanks: exception: ", e.what()));
  }
}

absl::Status RunThreads(const RunOptions& options, RankBody body) {
  WatchedLocalWorld world =
      MakeWatchedLocalWorld({.ranks = options.plan.ranks, .timeout = options.timeout});
  const auto ranks = world.ranks.size();
  if (ranks == 1) return RunGuarded(body, std::move(world.ranks[0]));
  std::vector<absl::Status> results(ranks);
  const auto run = [&](size_t rank) {
    results[rank] = RunGuarded(body, std::move(world.ranks[rank]));
    if (results[rank].ok()) return;
    world.fate->Kill(
        static_cast<int>(rank),
        absl::AbortedError(absl::StrCat("rank ", rank, " failed: ", results[rank].message())));
  };
  std::vector<std::thread> threads;
  absl::Status started;
  for (size_t rank = 0; rank < ranks; ++rank) {
    try {
      threads.emplace_back(run, rank);
    } catch (const std::exception& e) {  // the system has no more threads
      started = absl::ResourceExhaustedError(
          absl::StrCat("RunRanks: thread ", rank, " of ", ranks, " does not start: ", e.what()));
      world.fate->Kill(static_cast<int>(rank), started);
      break;
    }
  }
  for (std::thread& thread : threads) thread.join();
  MOE_RETURN_IF_ERROR(started);
  const int first = world.fate->origin();
  if (first >= 0 && !results[first].ok()) return results[first];
  for (const absl::Status& result : results) MOE_RETURN_IF_ERROR(result);
  return absl::OkStatus();
}

absl::Status NotBuilt(Backend backend) {
  return absl::UnimplementedError(
      absl::StrCat("PlanWorld: this build has no backend ", NameOf(backend), ", expected local"));
}

}  // namespace

const char* NameOf(Backend backend) {
  return backend == Backend::kLocal ? "local" : "mpi";
}

bool HasBackend(Backend backend) {
  return backend == Backend::kLocal || !LinkedMpi().empty();
}

absl::StatusOr<WorldPlan> PlanWorld(const WorldRequest& request, const LaunchInfo& launch) {
  const bool launched = launch.source != LaunchSource::kNone;
  if (request.ranks.has_value() && *request.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: ranks is ", *request.ranks, ", expected >= 1"));
  }
  if (launched && launch.size > 0 && request.ranks.value_or(launch.size) != launch.size) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: ranks is ", *request.ranks, ", the launcher (",
                     NameOf(launch.source), ") started ", launch.size, ", expected the same"));
  }
  if (launched && request.backend == Backend::kLocal) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: backend is local, but a launcher (", NameOf(launch.source),
                     ") started this process; ranks that are threads are started without one"));
  }
  if (launch.source == LaunchSource::kTorchrun || launch.source == LaunchSource::kFlags) {
    return absl::UnimplementedError(absl::StrCat(
        "PlanWorld: a launch by ", NameOf(launch.source), " needs NCCL, which this build has not; ",
        "start the ranks with: mpirun -n ", launch.size, " moe ..."));
  }
  const Backend backend = request.backend.value_or(launched ? Backend::kMpi : Backend::kLocal);
  if (!HasBackend(backend)) return NotBuilt(backend);
  WorldPlan plan{.backend = backend, .launch = launch};
  if (backend == Backend::kLocal) {
    plan.ranks = request.ranks.value_or(request.default_ranks);
    return plan;
  }
  if (!launched && request.ranks.value_or(1) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: backend is mpi with ranks ", *request.ranks,
                     ", but no launcher started this process; start it with: mpirun -n ",
                     *request.ranks, " moe ..."));
  }
  plan.ranks = launched ? launch.size : 1;
  return plan;
}

absl::Status RunRanks(const RunOptions& options, RankBody body) {
  if (options.plan.backend == Backend::kLocal) {
    if (options.plan.ranks >= 1) return RunThreads(options, body);
    return absl::InvalidArgumentError(
        absl::StrCat("RunRanks: ", options.plan.ranks, " ranks, expected >= 1"));
  }
  return RunMpiRank(options, [body](std::unique_ptr<Communicator> world) {
    return RunGuarded(body, std::move(world));
  });
}

}  // namespace moe
