#include "comm/bootstrap.h"

#include <iterator>
#include <utility>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Names of a launcher's variables; nullptr: it sets no such variable. A set exists when its rank or
// its size is set, and is complete when all variables that are not optional are set.
struct Launcher {
  LaunchSource source;
  const char* rank;
  const char* size = nullptr;
  const char* local_rank = nullptr;  // optional, unless there is a port
  const char* local_size = nullptr;  // optional
  const char* address = nullptr;
  const char* port = nullptr;
  // The set counts only where this variable is set and its value begins with `begins`.
  const char* only_with = nullptr;
  absl::string_view begins = "";
  // A variable that only processes started by the launcher itself have.
  const char* own = nullptr;
};

constexpr Launcher kTorchrun = {.source = LaunchSource::kTorchrun,
                                .rank = "RANK",
                                .size = "WORLD_SIZE",
                                .local_rank = "LOCAL_RANK",
                                .local_size = "LOCAL_WORLD_SIZE",
                                .address = "MASTER_ADDR",
                                .port = "MASTER_PORT"};

// torchrun that srun started: its processes have the variables of srun's task, too.
constexpr Launcher InsideStep(Launcher torchrun) {
  torchrun.only_with = "TORCHELASTIC_RUN_ID";
  torchrun.own = torchrun.only_with;
  return torchrun;
}

// Two rows of one source describe one launcher: the first row counts whose `only_with` is set.
constexpr Launcher kLaunchers[] = {
    {.source = LaunchSource::kOpenMpi,
     .rank = "OMPI_COMM_WORLD_RANK",
     .size = "OMPI_COMM_WORLD_SIZE",
     .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .own = "PMIX_NAMESPACE"},
    {.source = LaunchSource::kPmi,
     .rank = "PMI_RANK",
     .size = "PMI_SIZE",
     .local_rank = "MPI_LOCALRANKID",
     .local_size = "MPI_LOCALNRANKS",
     .own = "PMI_FD"},
    InsideStep(kTorchrun),
    // srun --mpi=pmix, whose namespaces are "slurm.pmix.JOB.STEP".
    {.source = LaunchSource::kPmix,
     .rank = "PMIX_RANK",
     .size = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .only_with = "PMIX_NAMESPACE",
     .begins = "slurm.",
     .own = "SLURM_TASK_PID"},
    {.source = LaunchSource::kPmix, .rank = "PMIX_RANK", .own = "PMIX_NAMESPACE"},
    {.source = LaunchSource::kSlurm,
     .rank = "SLURM_PROCID",
     .size = "SLURM_NTASKS",
     .local_rank = "SLURM_LOCALID",
     .only_with = "SLURM_STEP_ID",
     .own = "SLURM_TASK_PID"},
    kTorchrun,
};

const char* Value(EnvLookup lookup, const char* name) {
  const char* const value = name == nullptr ? nullptr : lookup(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

// Whether the variables, if they are set, describe a launch.
bool Counts(const Launcher& launcher, EnvLookup lookup) {
  if (launcher.only_with == nullptr) return true;
  const char* const value = Value(lookup, launcher.only_with);
  return value != nullptr && absl::StartsWith(value, launcher.begins);
}

absl::Status ReadInt(const Launcher& launcher, EnvLookup lookup, const char* name, int lowest,
                     int* out) {
  const char* const text = Value(lookup, name);
  if (text == nullptr) return absl::OkStatus();
  if (absl::SimpleAtoi(text, out) && *out >= lowest) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: ", name, " is '", text,
                                                 "', expected an integer >= ", lowest, "; or ",
                                                 HowToUnset(launcher.source)));
}

bool Exists(const Launcher& launcher, EnvLookup lookup) {
  return Value(lookup, launcher.rank) != nullptr || Value(lookup, launcher.size) != nullptr;
}

// The warning that a set which exists is incomplete; "" if it is complete.
std::string Lack(const Launcher& launcher, EnvLookup lookup) {
  std::vector<absl::string_view> set, unset;
  for (const char* name :
       {launcher.rank, launcher.size, launcher.port != nullptr ? launcher.local_rank : nullptr,
        launcher.address, launcher.port}) {
    if (name != nullptr) (Value(lookup, name) == nullptr ? unset : set).emplace_back(name);
  }
  if (unset.empty()) return "";
  return absl::StrCat(absl::StrJoin(set, ", "), set.size() > 1 ? " are" : " is", " set without ",
                      absl::StrJoin(unset, ", "), ", which a launcher sets beside: left out");
}

absl::Status CheckRange(const LaunchInfo& info, const char* rank_name, const char* size_name) {
  if (info.size == 0 || info.rank < info.size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("DetectLaunch: ", rank_name, " is ", info.rank, " and ", size_name, " is ",
                   info.size, ", expected a rank below the size; or ", HowToUnset(info.source)));
}

// Reads a set that is complete.
absl::StatusOr<LaunchInfo> Read(const Launcher& launcher, EnvLookup lookup) {
  LaunchInfo info{.source = launcher.source, .size = launcher.size == nullptr ? 0 : 1};
  const auto read = [&](const char* name, int lowest, int* out) {
    return ReadInt(launcher, lookup, name, lowest, out);
  };
  MOE_RETURN_IF_ERROR(read(launcher.rank, 0, &info.rank));
  MOE_RETURN_IF_ERROR(read(launcher.size, 1, &info.size));
  MOE_RETURN_IF_ERROR(read(launcher.local_rank, 0, &info.local_rank));
  MOE_RETURN_IF_ERROR(read(launcher.local_size, 1, &info.local_size));
  MOE_RETURN_IF_ERROR(read(launcher.port, 1, &info.port));
  if (info.port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: ", launcher.port, " is ",
                                                   info.port, ", expected a port, 1 to 65535; or ",
                                                   HowToUnset(info.source)));
  }
  if (const char* address = Value(lookup, launcher.address)) info.address = address;
  info.launcher_runs = Value(lookup, launcher.own) != nullptr;
  MOE_RETURN_IF_ERROR(CheckRange(info, launcher.rank, launcher.size));
  return info;
}

absl::StatusOr<std::optional<LaunchInfo>> ReadFlags(const LaunchFlags& flags) {
  if (!flags.rank.has_value() && !flags.size.has_value()) return std::nullopt;
  if (!flags.rank.has_value() || !flags.size.has_value()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "DetectLaunch: ", flags.rank.has_value() ? "--rank" : "--world-size", " is given and ",
        flags.rank.has_value() ? "--world-size" : "--rank", " is not, expected both or neither"));
  }
  const LaunchInfo info{.source = LaunchSource::kFlags,
                        .rank = *flags.rank,
                        .size = *flags.size,
                        .local_rank = flags.local_rank.value_or(0),
                        .address = flags.address,
                        .port = flags.port.value_or(0)};
  if (info.rank < 0 || info.size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: --rank is ", info.rank,
                                                   " and --world-size is ", info.size,
                                                   ", expected >= 0 and >= 1"));
  }
  MOE_RETURN_IF_ERROR(CheckRange(info, "--rank", "--world-size"));
  return info;
}

// Whether the process is a shell inside a Slurm step and the only task of that step.
bool IsShellOfStep(const LaunchInfo& launch) {
  return IsOfSrun(launch.source) && launch.size == 1;
}

// The first row of `source`, which has a size.
const Launcher* Find(LaunchSource source) {
  const auto* const found = absl::c_find_if(
      kLaunchers, [source](const Launcher& launcher) { return launcher.source == source; });
  return found == std::end(kLaunchers) ? nullptr : found;
}

absl::Status CheckAgree(const LaunchInfo& launch, const LaunchInfo& torchrun) {
  const Launcher& one = *Find(launch.source);
  const Launcher& other = *Find(torchrun.source);
  const auto check = [&](const char* name, int value, const char* other_name, int other_value) {
    if (value == other_value) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("DetectLaunch: ", name, " is ", value, " and ", other_name, " is ",
                     other_value, ", expected one launcher: unset ", other.rank, " ", other.size,
                     ", or ", one.rank, " ", one.size));
  };
  if (launch.size > 0) {
    MOE_RETURN_IF_ERROR(check(other.size, torchrun.size, one.size, launch.size));
  }
  return check(other.rank, torchrun.rank, one.rank, launch.rank);
}

// srun without a PMI leaves MPI to find the other tasks by itself, which most builds cannot.
std::string WithoutPmi(const LaunchInfo& launch) {
  return absl::StrCat("SLURM_PROCID is set without PMIX_RANK or PMI_RANK: srun started ",
                      launch.size,
                      " tasks that MPI may take for a job of its own each; srun --mpi=list has "
                      "those that it can start (pmix, pmi2)");
}

}  // namespace

absl::StatusOr<LaunchInfo> DetectLaunch(const LaunchFlags& flags, EnvLookup lookup) {
  MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> from_flags, ReadFlags(flags));
  if (from_flags.has_value()) return *from_flags;
  LaunchInfo launch;
  std::vector<std::string> warnings;
  std::vector<LaunchSource> seen;
  for (const Launcher& launcher : kLaunchers) {
    if (absl::c_linear_search(seen, launcher.source) || !Counts(launcher, lookup)) continue;
    seen.push_back(launcher.source);
    if (!Exists(launcher, lookup)) continue;
    if (std::string lack = Lack(launcher, lookup); !lack.empty()) {
      warnings.push_back(std::move(lack));
      continue;
    }
    const bool found = launch.source != LaunchSource::kNone;
    if (found && launcher.source != LaunchSource::kTorchrun) continue;
    MOE_ASSIGN_OR_RETURN(LaunchInfo info, Read(launcher, lookup));
    if (found) {
      MOE_RETURN_IF_ERROR(CheckAgree(launch, info));
    } else if (!IsShellOfStep(info)) {
      launch = std::move(info);
    }
  }
  if (launch.source == LaunchSource::kSlurm) warnings.push_back(WithoutPmi(launch));
  launch.warnings = std::move(warnings);
  return launch;
}

bool IsOfSrun(LaunchSource source) {
  return source == LaunchSource::kSlurm || source == LaunchSource::kPmix;
}

const char* NameOf(LaunchSource source) {
  if (source == LaunchSource::kFlags) return "--rank";
  const Launcher* const launcher = Find(source);
  return launcher == nullptr ? "none" : launcher->rank;
}

const char* LocalRankNameOf(LaunchSource source) {
  const Launcher* const launcher = Find(source);
  return launcher == nullptr ? nullptr : launcher->local_rank;
}

std::string HowToUnset(LaunchSource source) {
  const Launcher* const launcher = Find(source);
  if (launcher == nullptr) return "leave out --rank --world-size";
  return absl::StrCat("unset ", launcher->rank, " ", launcher->size);
}

absl::Status CheckMpiSize(const LaunchInfo& launch, absl::string_view linked_mpi, int mpi_size) {
  if (launch.source == LaunchSource::kNone || launch.size == 0 || launch.size == mpi_size) {
    return absl::OkStatus();
  }
  const bool other = (launch.source == LaunchSource::kOpenMpi && linked_mpi == "mpich") ||
                     (launch.source == LaunchSource::kPmi && linked_mpi == "openmpi");
  return absl::UnauthenticatedError(absl::StrCat(
      "CheckMpiSize: ", NameOf(launch.source), " belongs to a launch of ", launch.size,
      " ranks, MPI sees ", mpi_size, ", expected the same; this build links ", linked_mpi,
      other ? ", the launcher is of the other MPI: start with mpiexec." : "",
      other ? linked_mpi : "",
      IsOfSrun(launch.source) ? ", which needs another --mpi of srun: srun --mpi=list has them"
                              : ""));
}

}  // namespace moe
