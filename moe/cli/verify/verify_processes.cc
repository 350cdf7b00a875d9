#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <utility>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "comm/create.h"
#include "comm/descriptor.h"
#include "comm/patience.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/base/agreed_ranks.h"
#include "moe/cli/base/exit_code.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/verify/verify_options.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

namespace fs = std::filesystem;

// Wall time that one case may take on a busy machine, beside the start of the processes.
constexpr absl::Duration kCaseTime = absl::Seconds(5);

// --mpirun, or the linked MPI's own; "" if it is not there.
std::string LauncherOf(const VerifyOptions& options, const Invocation& invocation) {
  const std::string path = VariableOf(invocation.environment, "PATH");
  return options.mpirun.empty() ? FindMpiLauncher(path) : FindProgram(options.mpirun, path);
}

// What a launcher would take for its own, or the processes for theirs, stays out.
std::vector<std::string> ChildEnvironment(const std::vector<std::string>& environment) {
  std::vector<std::string> child;
  for (const std::string& entry : environment) {
    const absl::string_view name = absl::string_view(entry).substr(0, entry.find('='));
    bool ours = true;
    for (const char* prefix : {"OMPI_COMM_", "PMI_", "PMIX_", "SLURM_", "MPI_LOCAL"}) {
      ours = ours && !absl::StartsWith(name, prefix);
    }
    for (const char* other :
         {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}) {
      ours = ours && name != other;
    }
    if (ours) child.push_back(entry);
  }
  // More ranks than cores, and ranks that wait give their core away.
  child.emplace_back("OMPI_MCA_rmaps_base_oversubscribe=1");
  child.emplace_back("PRTE_MCA_rmaps_default_mapping_policy=:oversubscribe");
  child.emplace_back("OMPI_MCA_mpi_yield_when_idle=1");
  if (geteuid() == 0) {  // in containers; the processes do nothing but compute
    child.emplace_back("OMPI_ALLOW_RUN_AS_ROOT=1");
    child.emplace_back("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1");
  }
  return child;
}

std::vector<char*> Pointers(std::vector<std::string>& texts) {
  std::vector<char*> pointers;
  for (std::string& text : texts) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

bool MakePipe(Descriptor& read_end, Descriptor& write_end) {
  std::array<int, 2> ends = {};
  if (pipe2(ends.data(), O_CLOEXEC) != 0) return false;
  read_end = Descriptor(ends[0]);
  write_end = Descriptor(ends[1]);
  return true;
}

std::string ThisProgram(const std::string& called) {
  std::error_code error;
  const fs::path path = fs::read_symlink("/proc/self/exe", error);
  return error ? called : path.string();
}

// The last line that says something, for the message of a failure.
std::string LastError(const std::string& path) {
  std::ifstream file(path);
  std::string line, last;
  while (std::getline(file, line)) {
    if (absl::StartsWith(line, "moe verify: ")) return line.substr(std::strlen("moe verify: "));
    if (!absl::StripAsciiWhitespace(line).empty()) last = line;
  }
  return last;
}

// The child's wait status, unless it did not end within `longest`.
std::optional<int> StatusWithin(pid_t child, absl::Duration longest) {
  Patience patience(longest);
  int state = 0;
  while (waitpid(child, &state, WNOHANG) == 0) {
    if (patience.IsOver(false)) return std::nullopt;
    absl::SleepFor(absl::Milliseconds(5));
  }
  return state;
}

// The child's exit code, or -1 when it did not end within `longest` and was ended.
int Wait(pid_t child, absl::Duration longest) {
  const std::optional<int> state = StatusWithin(child, longest);
  if (state.has_value()) return WIFEXITED(*state) ? WEXITSTATUS(*state) : 128 + WTERMSIG(*state);
  kill(child, SIGTERM);  // mpirun ends its processes
  if (!StatusWithin(child, absl::Seconds(2)).has_value()) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  return -1;
}

// `arguments` with standard error in the file `errors`, for as long as this process lives: where a
// signal ends it, the child hears SIGTERM. Negative, with errno set: it does not start.
pid_t Spawn(std::vector<std::string> arguments, std::vector<std::string> environment, int errors) {
  const std::vector<char*> argv = Pointers(arguments), envp = Pointers(environment);
  const pid_t self = getpid();
  Descriptor status_read, status_write;
  if (!MakePipe(status_read, status_write)) return -1;
  const pid_t child = fork();
  if (child != 0) {
    status_write = Descriptor();
    int error = 0;
    if (child < 0 || read(status_read.number(), &error, sizeof error) <= 0) return child;
    waitpid(child, nullptr, 0);
    errno = error;
    return -1;
  }
  // Between fork and exec of a process with threads: nothing but what a signal handler may call.
  prctl(PR_SET_PDEATHSIG, SIGTERM);
  const int null = open("/dev/null", O_RDWR);
  dup2(null, STDIN_FILENO);
  dup2(null, STDOUT_FILENO);
  dup2(errors, STDERR_FILENO);
  if (getppid() == self) execve(argv.front(), argv.data(), envp.data());
  const int error = errno;
  (void)!write(status_write.number(), &error, sizeof error);
  _exit(127);
}

void WriteRequest(const std::string& path, const std::vector<verify::Case>& cases,
                  const std::vector<verify::Problem>& problems) {
  std::ofstream file(path);
  for (const verify::Case& c : cases) {
    const verify::Layout& l = c.layout;
    file << c.problem << ' ' << problems[c.problem].data_seed << ' ' << static_cast<int>(c.numerics)
         << ' ' << static_cast<int>(l.transport) << ' ' << l.ranks << ' ' << l.expert_parallel
         << ' ' << static_cast<int>(l.dispatch) << ' ' << l.overlap << '\n';
  }
}

struct Request {
  std::vector<verify::Problem> problems;
  std::vector<verify::Case> cases;
};

absl::StatusOr<Request> ReadRequest(const std::string& path, const VerifyOptions& options) {
  std::ifstream file(path);
  Request request;
  request.problems.resize(options.problems.size());
  size_t problem = 0;
  uint64_t seed = 0;
  int numerics = 0, transport = 0, dispatch = 0;
  verify::Layout layout;
  while (file >> problem >> seed >> numerics >> transport >> layout.ranks >>
         layout.expert_parallel >> dispatch >> layout.overlap) {
    if (problem >= options.problems.size()) {
      return absl::InternalError("the request names a problem that is not there");
    }
    layout.transport = static_cast<Backend>(transport);
    layout.dispatch = static_cast<DispatchAlgorithm>(dispatch);
    request.cases.push_back({problem, static_cast<Numerics>(numerics), layout});
    if (!request.problems[problem].tensors.empty()) continue;
    MOE_ASSIGN_OR_RETURN(request.problems[problem],
                         verify::DrawProblem(options.problems[problem], seed));
  }
  if (request.cases.empty()) return absl::InternalError("cannot read the request");
  return request;
}

absl::Status WriteResults(const std::string& path,
                          const std::vector<verify::LayerResult>& results) {
  errno = 0;  // a stream need not say why it fails
  std::ofstream file(path, std::ios::binary);
  for (const verify::LayerResult& result : results) {
    file.write(reinterpret_cast<const char*>(&result.torn_replicas), sizeof(result.torn_replicas));
    for (const std::vector<float>& tensor : result.tensors) {
      file.write(reinterpret_cast<const char*>(tensor.data()),
                 static_cast<std::streamsize>(tensor.size() * sizeof(float)));
    }
  }
  file.close();
  return file ? absl::OkStatus()
              : FileError("write", path, errno == 0 ? EIO : errno, FileFault::kWrite);
}

absl::StatusOr<std::vector<verify::LayerResult>> ReadResults(
    const std::string& path, const std::vector<verify::Case>& cases,
    const std::vector<verify::Problem>& problems) {
  std::ifstream file(path, std::ios::binary);
  std::vector<verify::LayerResult> results;
  for (const verify::Case& c : cases) {
    verify::LayerResult& result = results.emplace_back();
    file.read(reinterpret_cast<char*>(&result.torn_replicas), sizeof(result.torn_replicas));
    for (const verify::TensorSpec& spec : problems[c.problem].tensors) {
      std::vector<float>& tensor = result.tensors.emplace_back(spec.size());
      file.read(reinterpret_cast<char*>(tensor.data()),
                static_cast<std::streamsize>(tensor.size() * sizeof(float)));
    }
  }
  if (!file || file.peek() != std::ifstream::traits_type::eof()) {
    return absl::InternalError("the processes left results of another length than asked for");
  }
  return results;
}

// A file in memory, which the processes that this one starts open by its path: there is nothing to
// remove when this one ends, however it does.
struct SharedFile {
  Descriptor file;
  std::string path;
};

absl::StatusOr<SharedFile> MakeSharedFile() {
  Descriptor file(memfd_create("moe-verify", MFD_CLOEXEC));
  if (!file.is_open()) return FileError("make file", "moe-verify", errno, FileFault::kWrite);
  std::string path = absl::StrCat("/proc/", getpid(), "/fd/", file.number());
  return SharedFile{std::move(file), std::move(path)};
}

// What mpirun's end says of its processes.
absl::Status EndOf(int code, int ranks, absl::Duration limit, const std::string& errors) {
  if (code == 0) return absl::OkStatus();
  if (code < 0) {
    return absl::DeadlineExceededError(
        absl::StrCat("mpirun -n ", ranks, " did not end within ", absl::FormatDuration(limit)));
  }
  // Small numbers may be the launcher's own.
  const bool ours =
      code >= static_cast<int>(ExitCode::kMemory) && code <= static_cast<int>(ExitCode::kBackend);
  return WithExitCode(
      absl::InternalError(absl::StrCat("mpirun -n ", ranks, " ended with exit code ", code, ": ",
                                       LastError(errors))),
      ours ? static_cast<ExitCode>(code) : ExitCode::kPeer);
}

}  // namespace

absl::Status CheckLauncher(const VerifyOptions& options, const Invocation& invocation) {
  if (!HasBackend(Backend::kMpi) && options.mpirun.empty()) {
    return absl::UnimplementedError("this build has no MPI");
  }
  if (LauncherOf(options, invocation).empty()) {
    return absl::UnimplementedError(absl::StrCat(
        "there is no program '", options.mpirun.empty() ? "mpirun" : options.mpirun, "'"));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<verify::LayerResult>> RunProcesses(
    const Invocation& invocation, const VerifyOptions& options,
    const std::vector<verify::Problem>& problems, int ranks,
    const std::vector<verify::Case>& cases) {
  MOE_RETURN_IF_ERROR(CheckLauncher(options, invocation));
  MOE_ASSIGN_OR_RETURN(const SharedFile request, MakeSharedFile());
  MOE_ASSIGN_OR_RETURN(const SharedFile results, MakeSharedFile());
  MOE_ASSIGN_OR_RETURN(const SharedFile errors, MakeSharedFile());
  WriteRequest(request.path, cases, problems);
  const std::string mpirun = LauncherOf(options, invocation);
  std::vector<std::string> arguments = {mpirun,
                                        "-n",
                                        absl::StrCat(ranks),
                                        ThisProgram(invocation.program),
                                        "verify",
                                        kWorkerFlag,
                                        absl::StrCat(request.path, ":", results.path)};
  arguments.insert(arguments.end(), invocation.args.begin(), invocation.args.end());
  const pid_t child =
      Spawn(std::move(arguments), ChildEnvironment(invocation.environment), errors.file.number());
  if (child < 0) {
    return absl::UnimplementedError(
        absl::StrCat("'", mpirun, "' does not start: ", std::strerror(errno)));
  }
  const absl::Duration limit = options.comm_timeout + static_cast<double>(cases.size()) * kCaseTime;
  MOE_RETURN_IF_ERROR(EndOf(Wait(child, limit), ranks, limit, errors.path));
  return ReadResults(results.path, cases, problems);
}

absl::Status RunWorker(const std::string& files, const Settings& settings,
                       const VerifyOptions& options, const Invocation& invocation) {
  const std::pair<std::string, std::string> paths = absl::StrSplit(files, ':');
  MOE_ASSIGN_OR_RETURN(const Request request, ReadRequest(paths.first, options));
  const Backend transport = request.cases.front().layout.transport;
  const char* const device = options.device == DeviceKind::kCuda ? "cuda" : "cpu";
  Table world;
  world.Add("--ranks R", {Kind::kInteger, "1"}, "");
  world.Add("--backend NAME", {Kind::kText, NameOf(transport)}, "");
  world.Add("--device NAME", {Kind::kText, device}, "");
  MOE_ASSIGN_OR_RETURN(const Launch launch,
                       PlanLaunch(Settings(world), invocation.environment, ComputesOn::kAnyDevice));
  const auto body = [&](std::unique_ptr<Communicator> ranks) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(
        const auto results,
        verify::RunCases(request.problems, request.cases, options.fault, options.device, *ranks));
    if (ranks->rank() != 0) return absl::OkStatus();
    return OrAbort(*ranks, WriteResults(paths.second, results));
  };
  return RunAgreedRanks({.launch = launch,
                         .settings = settings,
                         .command = "verify",
                         .timeout = options.comm_timeout},
                        body);
}

}  // namespace moe::cli
