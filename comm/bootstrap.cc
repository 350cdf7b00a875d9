#include "comm/bootstrap.h"

#include <iterator>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// One family of variables. `required` ones come together or not at all; a set exists when its rank
// or its size is there. nullptr: the family has no such variable.
struct Family {
  LaunchSource source;
  const char* rank;
  const char* size;
  const char* local_rank;
  const char* local_size;
  const char* address;
  const char* port;
  bool rest_required;  // local_rank, address and port, too
};

constexpr Family kTorchrun = {LaunchSource::kTorchrun, "RANK",        "WORLD_SIZE",  "LOCAL_RANK",
                              "LOCAL_WORLD_SIZE",      "MASTER_ADDR", "MASTER_PORT", true};
constexpr Family kOpenMpi = {LaunchSource::kOpenMpi,
                             "OMPI_COMM_WORLD_RANK",
                             "OMPI_COMM_WORLD_SIZE",
                             "OMPI_COMM_WORLD_LOCAL_RANK",
                             "OMPI_COMM_WORLD_LOCAL_SIZE",
                             nullptr,
                             nullptr,
                             false};
constexpr Family kPmi = {LaunchSource::kPmi, "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID",
                         "MPI_LOCALNRANKS",  nullptr,    nullptr,    false};
constexpr Family kPmix = {LaunchSource::kPmix, "PMIX_RANK", nullptr, "PMIX_LOCAL_RANK",
                          "PMIX_LOCAL_SIZE",   nullptr,     nullptr, false};
constexpr Family kSlurm = {LaunchSource::kSlurm,
                           "SLURM_PROCID",
                           "SLURM_NTASKS",
                           "SLURM_LOCALID",
                           nullptr,
                           nullptr,
                           nullptr,
                           false};

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
                                  family.rest_required ? family.local_rank : nullptr,
                                  family.rest_required ? family.address : nullptr,
                                  family.rest_required ? family.port : nullptr};
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
  if (torchrun.size != mpi.size) {
    return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: WORLD_SIZE is ", torchrun.size,
                                                   " and ", family.size, " is ", mpi.size,
                                                   ", expected one launcher: unset the other's"));
  }
  if (torchrun.rank != mpi.rank) {
    return absl::InvalidArgumentError(absl::StrCat("DetectLaunch: RANK is ", torchrun.rank, " and ",
                                                   family.rank, " is ", mpi.rank,
                                                   ", expected one launcher: unset the other's"));
  }
  return absl::OkStatus();
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
  switch (source) {
    case LaunchSource::kNone:
      return "none";
    case LaunchSource::kFlags:
      return "--rank";
    case LaunchSource::kTorchrun:
      return "RANK";
    case LaunchSource::kOpenMpi:
      return "OMPI_COMM_WORLD_RANK";
    case LaunchSource::kPmi:
      return "PMI_RANK";
    case LaunchSource::kPmix:
      return "PMIX_RANK";
    case LaunchSource::kSlurm:
      return "SLURM_PROCID";
  }
  return "?";
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
