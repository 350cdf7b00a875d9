// comm/bootstrap.h: who started this process, of the variables that launchers and others set.
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "comm/bootstrap.h"

namespace moe {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

absl::StatusOr<LaunchInfo> Detect(const Variables& variables, const LaunchFlags& flags = {}) {
  return DetectLaunch(flags, [&](const char* name) -> const char* {
    const auto at = variables.find(name);
    return at == variables.end() ? nullptr : at->second.c_str();
  });
}

const Variables kTorchrun = {{"RANK", "2"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "0"},
                             {"MASTER_ADDR", "node7"},
                             {"MASTER_PORT", "29500"}};
// A step of srun --mpi=pmix; without PMIX_* one of srun alone.
const Variables kStep = {{"SLURM_STEP_ID", "0"},
                         {"SLURM_PROCID", "1"},
                         {"SLURM_NTASKS", "4"},
                         {"SLURM_LOCALID", "1"},
                         {"SLURM_TASK_PID", "77"}};
const Variables kStepPmix = {{"PMIX_RANK", "1"}, {"PMIX_NAMESPACE", "slurm.pmix.9.0"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "3"},
                            {"OMPI_COMM_WORLD_SIZE", "8"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};

Variables With(Variables variables, const Variables& more) {
  for (const auto& [name, value] : more) variables[name] = value;
  return variables;
}

void ExpectRefused(const Variables& variables, const char* one, const char* other) {
  const absl::Status status = Detect(variables).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  EXPECT_THAT(std::string(status.message()), AllOf(HasSubstr(one), HasSubstr(other)));
}

TEST(DetectLaunchTest, ReadsWhatEachLauncherSets) {
  const Variables batch = {
      {"SLURM_JOB_ID", "9"}, {"SLURM_PROCID", "1"}, {"SLURM_NTASKS", "2"}, {"SLURM_LOCALID", "1"}};
  const Variables of_one =
      With(batch, {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "1"}});
  const std::pair<Variables, LaunchInfo> cases[] = {
      {{{"HOME", "/root"}, {"RANK", ""}}, {}},
      {kTorchrun,
       {.source = LaunchSource::kTorchrun,
        .rank = 2,
        .size = 4,
        .address = "node7",
        .port = 29500}},
      {kOpenMpi,
       {.source = LaunchSource::kOpenMpi, .rank = 3, .size = 8, .local_rank = 1, .local_size = 2}},
      {{{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "1"}},
       {.source = LaunchSource::kPmi, .rank = 1, .size = 2, .local_rank = 1}},
      {{{"PMIX_RANK", "5"}}, {.source = LaunchSource::kPmix, .rank = 5, .size = 0}},  // MPI knows
      // Under another launcher than srun, the tasks are daemons of that launcher.
      {With(kStep, {{"PMIX_RANK", "5"}, {"PMIX_NAMESPACE", "prterun-host-9@1"}}),
       {.source = LaunchSource::kPmix, .rank = 5, .size = 0}},
      {With(kStep, kStepPmix),
       {.source = LaunchSource::kPmix, .rank = 1, .size = 4, .local_rank = 1}},
      {With(batch, {{"SLURM_STEP_ID", "0"}}),
       {.source = LaunchSource::kSlurm, .rank = 1, .size = 2, .local_rank = 1}},
      {batch, {}},  // in no step
      {of_one, {}},
      {With(With(of_one, kStepPmix), {{"PMIX_RANK", "0"}}), {}}};
  for (const auto& [variables, want] : cases) {
    const LaunchInfo info = Detect(variables).value();
    const auto all = [](const LaunchInfo& i) {
      return std::tie(i.source, i.rank, i.size, i.local_rank, i.local_size, i.address, i.port);
    };
    EXPECT_TRUE(all(info) == all(want)) << NameOf(want.source);
  }
}

TEST(DetectLaunchTest, TheFirstCompleteSetWins) {
  const Variables slurm = {{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}};
  // mpirun inside a Slurm step: its daemons are the step's tasks, its ranks are not.
  EXPECT_EQ(Detect(With(kOpenMpi, slurm)).value().source, LaunchSource::kOpenMpi);
  EXPECT_EQ(Detect(With(kOpenMpi, kStepPmix)).value().source, LaunchSource::kOpenMpi);
  // torchrun inside a step sets TORCHELASTIC_RUN_ID; a script that exports its other variables does
  // not.
  const Variables elastic = With(kTorchrun, {{"TORCHELASTIC_RUN_ID", "none"}});
  for (const Variables& step : {kStep, With(kStep, kStepPmix)}) {
    EXPECT_EQ(Detect(With(elastic, step)).value().source, LaunchSource::kTorchrun);
    const Variables agrees = With(With(kTorchrun, step), {{"RANK", "1"}});
    EXPECT_EQ(Detect(agrees).value().source, Detect(step).value().source);
  }
  EXPECT_EQ(Detect(With(kOpenMpi, {{"PMIX_RANK", "3"}})).value().source, LaunchSource::kOpenMpi);
  const LaunchInfo info = Detect(kOpenMpi, {.rank = 1, .size = 2}).value();
  EXPECT_EQ(info.source, LaunchSource::kFlags);
  EXPECT_EQ(info.rank, 1);
  // Variables that agree with the MPI launcher's change nothing.
  const Variables same = With(kOpenMpi, {{"RANK", "3"},
                                         {"WORLD_SIZE", "8"},
                                         {"LOCAL_RANK", "1"},
                                         {"MASTER_ADDR", "a"},
                                         {"MASTER_PORT", "1"}});
  EXPECT_EQ(Detect(same).value().source, LaunchSource::kOpenMpi);
}

// Variables that pods and shells of other programs have.
TEST(DetectLaunchTest, APartialSetIsAWarningAndNoLaunch) {
  const std::pair<Variables, const char*> cases[] = {
      {{{"WORLD_SIZE", "4"}, {"RANK", "0"}, {"MASTER_ADDR", "job-0"}},
       "RANK, WORLD_SIZE, MASTER_ADDR are set without LOCAL_RANK, MASTER_PORT,"},
      {{{"WORLD_SIZE", "2"}}, "WORLD_SIZE is set without RANK, LOCAL_RANK,"},
      {{{"RANK", "an"}}, "RANK is set without WORLD_SIZE,"},
      {{{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"LOCAL_RANK", "0"}},
       "RANK, WORLD_SIZE, LOCAL_RANK are set without MASTER_ADDR, MASTER_PORT,"},
      {{{"OMPI_COMM_WORLD_SIZE", "2"}},
       "OMPI_COMM_WORLD_SIZE is set without OMPI_COMM_WORLD_RANK,"},
      {{{"PMI_RANK", "2"}}, "PMI_RANK is set without PMI_SIZE,"},
      {{{"SLURM_STEP_ID", "1"}, {"SLURM_PROCID", "2"}},
       "SLURM_PROCID is set without SLURM_NTASKS,"}};
  for (const auto& [variables, warning] : cases) {
    const LaunchInfo alone = Detect(variables).value();
    EXPECT_EQ(alone.source, LaunchSource::kNone) << warning;
    EXPECT_THAT(alone.warnings, ElementsAre(HasSubstr(warning)));
    if (variables.count("OMPI_COMM_WORLD_SIZE") > 0) continue;
    const LaunchInfo beside = Detect(With(kOpenMpi, variables)).value();  // a whole set
    EXPECT_EQ(beside.rank, 3) << warning;
    EXPECT_THAT(beside.warnings, ElementsAre(HasSubstr(warning)));
  }
  EXPECT_THAT(Detect(kOpenMpi).value().warnings, IsEmpty());
  EXPECT_THAT(std::string(Detect({}, {.rank = 0}).status().message()),
              AllOf(HasSubstr("--rank"), HasSubstr("--world-size")));
}

TEST(DetectLaunchTest, AStepWithoutPmiIsAWarning) {
  const LaunchInfo info = Detect(kStep).value();
  EXPECT_EQ(info.source, LaunchSource::kSlurm);
  EXPECT_THAT(info.warnings, ElementsAre(AllOf(HasSubstr("SLURM_PROCID"), HasSubstr("4 tasks"))));
  EXPECT_THAT(Detect(With(kStep, kStepPmix)).value().warnings, IsEmpty());
}

// Variables that were exported by hand are no launcher that has started the other ranks.
TEST(DetectLaunchTest, ALaunchersOwnVariablesTellThatItRuns) {
  const Variables pmi = {{"PMI_RANK", "1"}, {"PMI_SIZE", "2"}};
  for (const Variables& by_hand : {kTorchrun, kOpenMpi, pmi}) {
    EXPECT_FALSE(Detect(by_hand).value().launcher_runs);
  }
  EXPECT_TRUE(Detect(With(kTorchrun, {{"TORCHELASTIC_RUN_ID", "9"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(With(kOpenMpi, {{"PMIX_NAMESPACE", "9"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(With(pmi, {{"PMI_FD", "6"}})).value().launcher_runs);
  EXPECT_TRUE(Detect(kStep).value().launcher_runs);
}

TEST(DetectLaunchTest, AContradictingSetNamesBothVariables) {
  ExpectRefused(With(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}), "OMPI_COMM_WORLD_RANK is 8",
                "OMPI_COMM_WORLD_SIZE is 8");
  ExpectRefused(With(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "8"}}), "or unset OMPI_COMM_WORLD_RANK",
                "OMPI_COMM_WORLD_SIZE");
  ExpectRefused(With(kTorchrun, {{"MASTER_PORT", "76982"}}), "MASTER_PORT is 76982",
                "expected a port, 1 to 65535");
  ExpectRefused(With(kTorchrun, kOpenMpi), "WORLD_SIZE is 4", "OMPI_COMM_WORLD_SIZE is 8");
  ExpectRefused(With(kTorchrun, kOpenMpi), "unset RANK WORLD_SIZE, or OMPI_COMM_WORLD_RANK", "");
  ExpectRefused(With(kTorchrun, {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}}), "RANK is 2",
                "PMI_RANK is 1");
  ExpectRefused(With(kTorchrun, kStep), "RANK is 2", "SLURM_PROCID is 1");
  ExpectRefused(With(kTorchrun, {{"PMIX_RANK", "0"}}), "RANK is 2", "PMIX_RANK is 0");
}

TEST(DetectLaunchTest, ValuesThatAreNoNumbersAreRefused) {
  for (const char* bad : {"x", "-1", "1.5", "99999999999"}) {
    ExpectRefused({{"PMI_RANK", bad}, {"PMI_SIZE", "4"}}, "PMI_RANK is", bad);
  }
  ExpectRefused({{"PMI_RANK", "0"}, {"PMI_SIZE", "0"}}, "PMI_SIZE is '0'", "integer >= 1");
}

TEST(CheckMpiSizeTest, AWorldOfOneBelowALauncherIsTheOtherMpi) {
  const LaunchInfo open_mpi = {.source = LaunchSource::kOpenMpi, .rank = 1, .size = 4};
  EXPECT_TRUE(CheckMpiSize(open_mpi, "openmpi", 4).ok());
  const absl::Status status = CheckMpiSize(open_mpi, "mpich", 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("launch of 4 ranks, MPI sees 1"), HasSubstr("mpiexec.mpich")));
  const LaunchInfo pmi = {.source = LaunchSource::kPmi, .size = 2};
  EXPECT_THAT(std::string(CheckMpiSize(pmi, "openmpi", 1).message()), HasSubstr("mpiexec.openmpi"));
  const LaunchInfo step = {.source = LaunchSource::kSlurm, .size = 4};
  EXPECT_THAT(std::string(CheckMpiSize(step, "openmpi", 1).message()),
              AllOf(HasSubstr("SLURM_PROCID belongs to"), HasSubstr("srun --mpi=list")));
  EXPECT_TRUE(CheckMpiSize({}, "mpich", 1).ok());
  EXPECT_TRUE(CheckMpiSize({.source = LaunchSource::kPmix, .size = 0}, "openmpi", 3).ok());
}

}  // namespace
}  // namespace moe
