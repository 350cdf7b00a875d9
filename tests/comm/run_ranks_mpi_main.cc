// Runs RunRanks as a program would, for tests of exit codes under mpiexec.
//   run_ranks_mpi_main ok        every rank sums the ranks and checks the sum
//   run_ranks_mpi_main fail      the last rank fails with kDataLoss while the others wait: exit 6
//   run_ranks_mpi_main cut       as fail, and no launcher answers MPI_Abort: exit 6 all the same
//   run_ranks_mpi_main late      the last rank never starts MPI: the others' own deadline for that
//   run_ranks_mpi_main missing   the last rank stays away: exit 8 after the deadline
//   run_ranks_mpi_main verdict   all is well; rank 0 leaves with 5, the last is in MPI_Finalize
#include <cstdio>
#include <cstdlib>
#include <string>

#include <unistd.h>

#include <mpi.h>

#include "comm/create.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

bool leaves_late = false, is_cut_off = false;

int ExitCode(const absl::Status& status) {
  if (status.ok()) return 0;
  return absl::IsDataLoss(status) ? 6 : absl::IsDeadlineExceeded(status) ? 8 : 1;
}

void Report(const absl::Status& status) {
  std::fprintf(stderr, "run_ranks_mpi_main: %s\n", status.ToString().c_str());
}

absl::Status Body(const std::string& mode, std::unique_ptr<Communicator> world) {
  const bool last = world->rank() == world->size() - 1;
  if ((mode == "fail" || mode == "cut") && last) return absl::DataLossError("loss is NaN");
  if (mode == "missing" && last) sleep(60);
  const auto stream = MakeInlineStream();
  int64_t sum = world->rank() + 1;
  MOE_RETURN_IF_ERROR(world->AllReduce<int64_t>({&sum, 1}, ReduceOp::kSum, *stream));
  const int64_t ranks = world->size();
  if (sum == ranks * (ranks + 1) / 2) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("the ranks sum to ", sum));
}

int Main(const std::string& mode) {
  const auto launch = DetectLaunch({}, [](const char* name) { return std::getenv(name); });
  const auto plan = launch.ok() ? PlanWorld({}, *launch) : launch.status();
  if (!plan.ok()) {
    Report(plan.status());
    return ExitCode(plan.status());
  }
  if (mode == "late" && launch->rank == launch->size - 1) sleep(5);
  leaves_late = mode == "verdict" && launch->rank == launch->size - 1;
  is_cut_off = mode == "cut";
  const bool late = mode == "late";
  const RunOptions options = {.plan = *plan,
                              .timeout = absl::Seconds(mode == "missing" ? 1
                                                       : late            ? 0.2
                                                                         : 30),
                              .start_timeout = absl::Seconds(late ? 1 : 30),
                              .report = Report,
                              .exit_code = ExitCode};
  const absl::Status status = RunRanks(
      options, [&](std::unique_ptr<Communicator> world) { return Body(mode, std::move(world)); });
  if (!status.ok()) Report(status);
  return mode == "verdict" && launch->rank == 0 ? 5 : ExitCode(status);
}

}  // namespace
}  // namespace moe

// In place of the library's.
extern "C" int MPI_Abort(MPI_Comm comm, int code) {
  while (moe::is_cut_off) pause();
  return PMPI_Abort(comm, code);
}
extern "C" int MPI_Finalize() {
  const int result = PMPI_Finalize();
  if (moe::leaves_late) sleep(5);
  return result;
}

int main(int argc, char** argv) {
  return moe::Main(argc > 1 ? argv[1] : "ok");
}
