#include "comm/mpi/mpi_run.h"

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/time/time.h>
#include <unistd.h>

#include <mpi.h>

#include "comm/descriptor.h"
#include "comm/mpi/host_watch.h"
#include "comm/mpi/mpi_lane.h"
#include "comm/mpi/mpi_world.h"
#include "comm/patience.h"
#include "kernels/base/caught.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Between construction and destruction MPI may be called from any thread. One per process, made and
// destroyed on the main thread.
class MpiSession {
 public:
  // MPI_Init_thread(MPI_THREAD_MULTIPLE), unless someone else has initialised MPI; errors on
  // MPI_COMM_WORLD return instead of ending the job. kUnavailable when MPI fails or grants less.
  static absl::StatusOr<std::unique_ptr<MpiSession>> Start();

  // MPI_Finalize, if Start initialised. It waits for the other processes without a deadline: after
  // a failure call AbortJob instead.
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  int size() const { return size_; }

 private:
  explicit MpiSession(bool owns) : owns_(owns) {}

  const bool owns_;
  int size_ = 1;
};

absl::StatusOr<std::unique_ptr<MpiSession>> MpiSession::Start() {
  int initialized = 0;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Initialized(&initialized), "MPI_Initialized"));
  int finalized = 0;
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Finalized(&finalized), "MPI_Finalized"));
  if (finalized != 0) return absl::UnavailableError("MpiSession: MPI has ended in this process");
  std::unique_ptr<MpiSession> session(new MpiSession(initialized == 0));
  int level = MPI_THREAD_SINGLE;
  MOE_RETURN_IF_ERROR(session->owns_
                          ? FromMpi(MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &level),
                                    "MPI_Init_thread")
                          : FromMpi(MPI_Query_thread(&level), "MPI_Query_thread"));
  if (level < MPI_THREAD_MULTIPLE) {
    return absl::UnavailableError(
        "MpiSession: MPI grants less than MPI_THREAD_MULTIPLE, which streams need");
  }
  // MPICH reports a failed MPI_Test to MPI_COMM_WORLD's handler, whatever the communicator.
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN),
                              "MPI_Comm_set_errhandler"));
  MOE_RETURN_IF_ERROR(FromMpi(MPI_Comm_size(MPI_COMM_WORLD, &session->size_), "MPI_Comm_size"));
  return session;
}

MpiSession::~MpiSession() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  if (owns_ && initialized != 0 && finalized == 0) MPI_Finalize();
}

// Time for MPI_Abort: a launcher that answers ends the job sooner.
constexpr unsigned kAbortSeconds = 2;

volatile std::sig_atomic_t aborted_with = 1;  // exit code

// Ends every process of the job.
[[noreturn]] void AbortJob(int exit_code) {
  // Above all the line with the reason; a launcher that reads nothing any more is not waited for.
  AwaitReader(STDERR_FILENO, absl::Seconds(1));
  // On a host that has lost the others MPI_Abort waits for the launcher without an end. A signal
  // needs neither memory nor a thread.
  aborted_with = exit_code;
  sigset_t alarms;
  sigemptyset(&alarms);
  sigaddset(&alarms, SIGALRM);
  pthread_sigmask(SIG_UNBLOCK, &alarms, nullptr);
  std::signal(SIGALRM, [](int) { _exit(aborted_with); });
  alarm(kAbortSeconds);
  MPI_Abort(MPI_COMM_WORLD, exit_code);
  _exit(exit_code);  // MPI_Abort does not return where a launcher watches
}

// MPI_Init and MPI_Finalize wait for every process of the job, and nothing wakes them: when one
// takes longer than the deadline this reports and ends the process, and the launcher the job.
class Watchdog {
 public:
  Watchdog(const char* what, absl::Duration timeout, const RunOptions& options)
      : thread_([this, what, timeout, &options] { Watch(what, timeout, options); }) {}
  ~Watchdog() {
    {
      const std::lock_guard<std::mutex> lock(mu_);
      done_ = true;
    }
    cv_.notify_one();
    thread_.join();
  }
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void Watch(const char* what, absl::Duration timeout, const RunOptions& options) {
    std::unique_lock<std::mutex> lock(mu_);
    Patience patience(timeout);
    do {
      if (cv_.wait_until(lock, patience.NextLook(), [this] { return done_; })) return;
    } while (!patience.IsOver(false));
    const absl::Status late = absl::DeadlineExceededError(
        absl::StrCat(what, ": not done after ", absl::FormatDuration(timeout),
                     ", expected every process of the job to join: one is missing or stopped"));
    if (options.report) options.report(late);
    _exit(options.exit_code ? options.exit_code(late) : 1);
  }

  std::mutex mu_;
  std::condition_variable cv_;
  bool done_ = false;   // guarded by mu_
  std::thread thread_;  // last: starts after the state above exists
};

// Session that AskMpiSize started, until a rank runs in it. It is not ended where no rank does:
// MPI_Finalize would wait for processes that may have failed.
MpiSession* asked_session = nullptr;

absl::StatusOr<std::unique_ptr<MpiSession>> StartInTime(const RunOptions& options) {
  if (asked_session != nullptr) {
    return std::unique_ptr<MpiSession>(std::exchange(asked_session, nullptr));
  }
  const Watchdog watchdog("MPI_Init_thread", StartTimeout(options), options);
  return MpiSession::Start();
}

// `status` with `text` appended, for a report: without payloads.
absl::Status Appended(const absl::Status& status, absl::string_view text) {
  return absl::Status(status.code(), absl::StrCat(status.message(), "; ", text));
}

// Reports a failure on one rank of a host. That rank ends the others, which wait two seconds for it
// and then end the job themselves.
void ReportOnce(HostWatch& watch, const RunOptions& options, const absl::Status& status) {
  // A launcher that ends the job because of another host's report is obeyed at once.
  std::signal(SIGTERM, SIG_DFL);
  const std::optional<std::string> silent = watch.MaySpeak(status);
  if (!silent.has_value()) {
    std::this_thread::sleep_for(std::chrono::seconds(2));
    return;
  }
  const bool add = absl::IsDeadlineExceeded(status) && !silent->empty();
  if (options.report) options.report(add ? Appended(status, *silent) : status);
}

}  // namespace

absl::string_view LinkedMpi() {
  return MOE_LINKED_MPI;
}

absl::StatusOr<int> AskMpiSize(const RunOptions& options) {
  MOE_ASSIGN_OR_RETURN(std::unique_ptr<MpiSession> session, StartInTime(options));
  asked_session = session.release();
  return asked_session->size();
}

absl::Status RunMpiRank(const RunOptions& asked, RankBody body) {
  HostWatch watch(asked);
  RunOptions options = asked;
  options.report = [&](const absl::Status& status) {
    ReportOnce(watch, asked, status);
  };
  MOE_ASSIGN_OR_RETURN(std::unique_ptr<MpiSession> session, StartInTime(options));
  absl::Status status = CheckMpiSize(options.plan.launch, LinkedMpi(), session->size());
  if (status.ok()) {
    status = Caught([&]() -> absl::Status {
      MOE_ASSIGN_OR_RETURN(auto world, MakeMpiWorld({.comm = MPI_Comm_c2f(MPI_COMM_WORLD),
                                                     .timeout = options.timeout,
                                                     .start_timeout = StartTimeout(options)}));
      const auto places = asked.watch == nullptr
                              ? nullptr
                              : &asked.watch->Of(world->rank(), world->size())->places();
      MOE_RETURN_IF_ERROR(watch.Join(*world, places));
      return body(std::move(world));
    });
  }
  // MPI_Finalize of a lone process waits for nobody: the caller may report and leave by itself.
  if (status.ok() || session->size() == 1) {
    const Watchdog watchdog("MPI_Finalize", options.timeout, options);
    session.reset();
    return status;
  }
  options.report(status);
  AbortJob(options.exit_code ? options.exit_code(status) : 1);
}

}  // namespace moe
