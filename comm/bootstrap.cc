#include "comm/bootstrap.h"

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// One family of variables. A set exists when its rank or its size is there; rank and size come
// together or not at all, with a port all but the local size. nullptr: the family has no such
// variable.
struct Family {
  LaunchSource source;
  const char* rank;
  const char* size = nullptr;
  const char* local_rank = nullptr;
  const char* local_size = nullptr;
  const char* address = nullptr;
  const char* port = nullptr;
};

constexpr Family kTorchrun = {.source = LaunchSource::kTorchrun,
                              .rank = "RANK",
                              .size = "WORLD_SIZE",
                              .local_rank = "LOCAL_RANK",
                              .local_size = "LOCAL_WORLD_SIZE",
                              .address = "MASTER_ADDR",
                              .port = "MASTER_PORT"};
constexpr Family kOpenMpi = {.source = LaunchSource::kOpenMpi,
                             .rank = "OMPI_COMM_WORLD_RANK",
                             .size = "OMPI_COMM_WORLD_SIZE",
                             .local_rank = "OMPI_COMM_WORLD_LOCAL_RANK",
                             .local_size = "OMPI_COMM_WORLD_LOCAL_SIZE"};
constexpr Family kPmi = {.source = LaunchSource::kPmi,
                         .rank = "PMI_RANK",
                         .size = "PMI_SIZE",
                         .local_rank = "MPI_LOCALRANKID",
                         .local_size = "MPI_LOCALNRANKS"};
constexpr Family kPmix = {.source = LaunchSource::kPmix,
                          .rank = "PMIX_RANK",
                          .local_rank = "PMIX_LOCAL_RANK",
                          .local_size = "PMIX_LOCAL_SIZE"};
constexpr Family kSlurm = {.source = LaunchSource::kSlurm,
                           .rank = "SLURM_PROCID",
                           .size = "SLURM_NTASKS",
                           .local_rank = "SLURM_LOCALID"};

const char* Value(EnvLookup lookup, const char* name) {
  const char* const value = name == nullptr ? nullptr : lookup(name);
  return value == nullptr || *value == '\0' ? nullptr : value;
}

absl::Status ReadInt(EnvLookup lookup, const char* name, int lowest, int* out) {
  const char* const text = Value(lookup, name);
  if (text == nullptr) return absl::OkStatus();
  if (absl::SimpleAtoi(text, out) && *out >= lowest) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("DetectLaunch: ", name, " is '", text, "', expected an integer >= ", lowest));
}

absl::Status CheckComplete(const Family& family, EnvLookup lookup) {
  const char* const required[] = {family.rank, family.size,
                                  family.port != nullptr ? family.local_rank : nullptr,
                                  family.address, family.port};
  const char* present = nullptr;
  const char* absent = nullptr;
  for (const char* name : required) {
    if (name == nullptr) continue;
    const bool is_set = Value(lookup, name) != nullptr;
    if (is_set && present == nullptr) present = name;
    if (!is_set && absent == nullptr) absent = name;
  }
  if (absent == nullptr) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: ", present, " is set and ", absent,
                                                 " is not, expected both or neither"));
}

absl::Status CheckRange(const LaunchInfo& info, const char* rank_name, const char* size_name) {
  if (info.size == 0 || info.rank < info.size) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: ", rank_name, " is ", info.rank,
                                                 " and ", size_name, " is ", info.size,
                                                 ", expected a rank below the size"));
}

// nullopt when there is no such set.
absl::StatusOr<std::optional<LaunchInfo>> Read(const Family& family, EnvLookup lookup) {
  if (Value(lookup, family.rank) == nullptr && Value(lookup, family.size) == nullptr) {
    return std::nullopt;
  }
  MOE_RETURN_IF_ERROR(CheckComplete(family, lookup));
  LaunchInfo info{.source = family.source, .size = family.size == nullptr ? 0 : 1};
  MOE_RETURN_IF_ERROR(ReadInt(lookup, family.rank, 0, &info.rank));
  MOE_RETURN_IF_ERROR(ReadInt(lookup, family.size, 1, &info.size));
  MOE_RETURN_IF_ERROR(ReadInt(lookup, family.local_rank, 0, &info.local_rank));
  MOE_RETURN_IF_ERROR(ReadInt(lookup, family.local_size, 1, &info.local_size));
  MOE_RETURN_IF_ERROR(ReadInt(lookup, family.port, 1, &info.port));
  if (const char* address = Value(lookup, family.address)) info.address = address;
  MOE_RETURN_IF_ERROR(CheckRange(info, family.rank, family.size));
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

absl::Status CheckAgree(const LaunchInfo& torchrun, const LaunchInfo& mpi, const Family& family) {
  const auto check = [](const char* name, int value, const char* other_name, int other) {
    if (value == other) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: ", name, " is ", value, " and ",
                                                   other_name, " is ", other,
                                                   ", expected one launcher: unset the other's"));
  };
  MOE_RETURN_IF_ERROR(check("WORLD_SIZE", torchrun.size, family.size, mpi.size));
  return check("RANK", torchrun.rank, family.rank, mpi.rank);
}

}  // namespace

absl::StatusOr<LaunchInfo> DetectLaunch(const LaunchFlags& flags, EnvLookup lookup) {
  MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> from_flags, ReadFlags(flags));
  if (from_flags.has_value()) return *from_flags;
  MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> torchrun, Read(kTorchrun, lookup));
  for (const Family& family : {kOpenMpi, kPmi}) {
    MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> mpi, Read(family, lookup));
    if (!mpi.has_value()) continue;
    if (torchrun.has_value()) MOE_RETURN_IF_ERROR(CheckAgree(*torchrun, *mpi, family));
    return *mpi;
  }
  if (torchrun.has_value()) return *torchrun;
  MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> pmix, Read(kPmix, lookup));
  if (pmix.has_value()) return *pmix;
  if (Value(lookup, "SLURM_STEP_ID") == nullptr) return LaunchInfo{};
  MOE_ASSIGN_OR_RETURN(const std::optional<LaunchInfo> slurm, Read(kSlurm, lookup));
  if (slurm.has_value() && slurm->size > 1) return *slurm;
  return LaunchInfo{};
}

const char* NameOf(LaunchSource source) {
  for (const Family& family : {kTorchrun, kOpenMpi, kPmi, kPmix, kSlurm}) {
    if (family.source == source) return family.rank;
  }
  return source == LaunchSource::kFlags ? "--rank" : "none";
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
      other ? linked_mpi : ""));
}

}  // namespace moe
