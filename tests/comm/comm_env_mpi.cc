
#include <absl/time/clock.h>
#include <gtest/gtest.h>

#include <mpi.h>

#include "comm/mpi/mpi_world.h"
#include "tests/comm/comm_env.h"

namespace moe::testing {
namespace {

// Holds MPI for the test process. Every rank prints and fails on its own; mpiexec fails if one
// does.
class MpiEnv final : public CommEnv, public ::testing::Environment {
 public:
  void SetUp() override {
    int level = MPI_THREAD_SINGLE;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level);
    // MPICH reports a failed MPI_Test to MPI_COMM_WORLD's handler, whatever the communicator.
    MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN);
    MPI_Comm_rank(MPI_COMM_WORLD, &rank_);
    MPI_Comm_size(MPI_COMM_WORLD, &size_);
  }
  void TearDown() override { MPI_Finalize(); }

  const char* name() const override { return "mpi"; }
  int max_ranks() const override { return size_; }
  bool wakes_peers() const override { return false; }
  void Run(int ranks, absl::Duration timeout, EnvStream kind,
           absl::FunctionRef<void(Communicator&, Stream&)> body) override {
    MPI_Comm part = MPI_COMM_NULL;
    MPI_Comm_split(MPI_COMM_WORLD, rank_ < ranks ? 0 : MPI_UNDEFINED, rank_, &part);
    if (part != MPI_COMM_NULL) {
      // Whatever the deadline: on a busy machine ranks may come late.
      const auto comm =
          MakeMpiWorld({.comm = MPI_Comm_c2f(part), .timeout = timeout, .start_timeout = kPatience})
              .value();
      const auto stream = MakeEnvStream(kind);
      body(*comm, *stream);
    }
    Meet();
    if (part != MPI_COMM_NULL) MPI_Comm_free(&part);
  }

 private:
  // MPI_Barrier spins: ranks that sit out would take the cores from those that run the test.
  static void Meet() {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    for (int done = 0;;) {
      MPI_Test(&request, &done, MPI_STATUS_IGNORE);
      if (done != 0) return;
      absl::SleepFor(absl::Microseconds(100));
    }
  }

  int rank_ = 0, size_ = 1;
};

MpiEnv* const env = [] {
  auto* made = new MpiEnv;
  ::testing::AddGlobalTestEnvironment(made);  // gtest owns it
  return made;
}();

}  // namespace

CommEnv& Env() {
  return *env;
}

}  // namespace moe::testing
