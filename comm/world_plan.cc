#include "comm/world_plan.h"

#include <absl/strings/str_cat.h>

#include "comm/nccl/nccl_world.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// `wanted`: by whom.
absl::Status NotBuilt(Backend backend, absl::string_view wanted) {
  const char* const remedy = backend == Backend::kMpi
                                 ? "no MPI; rebuild with -DMOE_ENABLE_MPI=ON"
                                 : "no NCCL; rebuild where CUDA and nccl.h are";
  return absl::UnimplementedError(
      absl::StrCat("PlanWorld: ", wanted, ", but this build has ", remedy));
}

std::string HowToLeave(const LaunchInfo& launch) {
  return absl::StrCat(HowToUnset(launch.source), ", or backend local");
}

absl::Status LaunchedWithoutMpi(const LaunchInfo& launch) {
  const absl::Status status = NotBuilt(
      Backend::kMpi, absl::StrCat("started by ", IsOfSrun(launch.source) ? "srun" : "mpirun"));
  return absl::Status(
      status.code(), absl::StrCat(status.message(), "; or take each process for a job of its own: ",
                                  HowToLeave(launch)));
}

bool ByTorchrun(const LaunchInfo& launch) {
  return launch.source == LaunchSource::kTorchrun || launch.source == LaunchSource::kFlags;
}

absl::Status CheckRanks(const WorldRequest& request, const LaunchInfo& launch) {
  if (request.ranks.has_value() && *request.ranks < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: ranks is ", *request.ranks, ", expected >= 1"));
  }
  const bool launched = launch.source != LaunchSource::kNone;
  if (!launched || launch.size == 0 || request.ranks.value_or(launch.size) == launch.size) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("PlanWorld: ranks is ", *request.ranks, ", the launcher (",
                   NameOf(launch.source), ") started ", launch.size, ", expected the same",
                   launch.launcher_runs ? "" : absl::StrCat("; or ", HowToLeave(launch))));
}

// Processes without MPI.
absl::StatusOr<WorldPlan> PlanTorchrun(const WorldRequest& request, const LaunchInfo& launch) {
  if (request.backend == Backend::kMpi) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: backend is mpi, but ranks that ", NameOf(launch.source),
                     " started have none, expected nccl; or start them with: mpirun -n ",
                     launch.size, " moe ..."));
  }
  if (request.device == DeviceKind::kCuda && HasNccl()) {
    return WorldPlan{.backend = Backend::kNccl,
                     .meeting = Meeting::kTcp,
                     .ranks = launch.size,
                     .launch = launch};
  }
  return absl::UnimplementedError(absl::StrCat(
      "PlanWorld: a launch by ", NameOf(launch.source), " needs ",
      HasNccl() ? "GPUs (--device cuda)" : "NCCL, and this build has none",
      "; start the ranks with: mpirun -n ", launch.size, " moe ...; or ", HowToLeave(launch)));
}

}  // namespace

bool HasBackend(Backend backend) {
  if (backend == Backend::kNccl) return HasNccl();
  return backend == Backend::kLocal || !LinkedMpi().empty();
}

absl::StatusOr<WorldPlan> PlanWorld(const WorldRequest& request, const LaunchInfo& found) {
  const LaunchInfo launch = request.backend == Backend::kLocal ? LaunchInfo{} : found;
  const bool launched = launch.source != LaunchSource::kNone;
  MOE_RETURN_IF_ERROR(CheckRanks(request, launch));
  if (request.backend == Backend::kNccl && request.device != DeviceKind::kCuda) {
    return absl::InvalidArgumentError(
        "PlanWorld: backend is nccl, whose ranks compute on GPUs: expected --device cuda beside "
        "it");
  }
  if (ByTorchrun(launch)) return PlanTorchrun(request, launch);
  const Backend backend = request.backend.value_or(launched ? Backend::kMpi : Backend::kLocal);
  if (!HasBackend(backend)) {
    return request.backend.has_value()
               ? NotBuilt(backend, absl::StrCat("backend is ", NameOf(backend)))
               : LaunchedWithoutMpi(launch);
  }
  WorldPlan plan{.backend = backend, .launch = launch};
  if (!launched && backend != Backend::kMpi) {
    plan.ranks = request.ranks.value_or(request.default_ranks);
    return plan;
  }
  if (!HasBackend(Backend::kMpi)) return LaunchedWithoutMpi(launch);
  if (!launched && request.ranks.value_or(1) != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("PlanWorld: backend is mpi with ranks ", *request.ranks,
                     ", but no launcher started this process; start it with: mpirun -n ",
                     *request.ranks, " moe ..."));
  }
  plan.meeting = Meeting::kMpi;
  plan.ranks = launched ? launch.size : 1;
  return plan;
}

}  // namespace moe
