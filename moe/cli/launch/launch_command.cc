// moe launch: starts a command on several hosts by the launcher that is there, and again after a
// loss.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>
#include <absl/time/clock.h>
#include <unistd.h>

#include "comm/world_plan.h"
#include "kernels/base/machine_limits.h"
#include "kernels/base/status_macros.h"
#include "moe/checkpoint/reader.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/common_settings.h"
#include "moe/cli/base/config_file.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/run_status.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/base/terminal.h"
#include "moe/cli/launch/engine.h"
#include "moe/cli/launch/hosts.h"
#include "moe/cli/launch/restarts.h"
#include "moe/cli/launch/supervisor.h"
#include "moe/io/file.h"
#include "moe/io/file_system.h"
#include "moe/io/file_work.h"

namespace moe::cli {
namespace {

using launch::Engine;
using launch::Host;

constexpr char kHead[] =
    R"(usage: moe launch [flags] -- moe COMMAND ...
       moe launch [flags] -- PROGRAM ...

Starts a command with a rank for each slot of the hosts, by the launcher that is there: the mpirun
of the MPI that this build is linked with, srun inside an allocation of Slurm, torchrun. Prints the
line that it runs, and opens no socket of its own. --engine local runs the command as it is, with
threads as its ranks.

  moe launch --ranks-per-node 4 -- moe train --data book.txt --save run --ep 4
  moe launch --hosts hosts --nodes 2:4 -- moe train --data book.txt --save /shared/run
  moe launch --hosts hosts --dry-run -- moe verify
  moe launch --engine local -- moe train --ranks 4 --data book.txt --save run

Where moe train has --save, a job that has lost a rank or a host is started again with the hosts
that answer, and goes on from the newest checkpoint: with --resume auto, unless another is given.
Other commands are started once.
)";

constexpr char kTail[] = R"(
What is started again, by exit code:

  0, 11               no: complete, stopped on request (--restart-on-stop: yes)
  1, 2, 3, 6, 9, 10   no: the same would happen; but with --hosts 9 may be the launcher's own for
                      a lost host: yes
  126, 127            no: the program could not be started
  5                   once
  4, 7, 8, others     yes: storage failed; a rank, a host or the launcher was lost

The code is the one in --save's status.json, if the run left one (moe status), else the launcher's:
Hydra's is the number of a signal at times and torchrun's is 1, so a run that they lost has code 7.

Two restarts in a row without a newer checkpoint are the last; with --requeue they are noted in
--save's requeue.json, as is a lack of memory. The pause before a restart doubles from
--restart-delay to 5 minutes; an hour of a job that left a newer checkpoint takes one restart from
the count.

SIGTERM, SIGINT, SIGHUP and SIGUSR1 let the ranks save and end with 11, without the two seconds that
mpirun leaves after a SIGTERM; a second one kills the job. SIGUSR2 is passed on.

Exit codes: that of the last job, 2 usage, 9 fewer hosts answer than --nodes needs, 10 this build
has no such launcher.
)";

constexpr int kProbeSeconds = 5;

struct Options {
  std::string hosts, nodes, remote_shell = "ssh";
  int ranks_per_node = 0;
  launch::RestartOptions restarts;
  absl::Duration node_timeout = absl::Minutes(10), launcher_timeout = absl::Seconds(30);
};

Table LaunchSettings(Options& options) {
  Table t;
  t.Group("Where");
  std::vector<std::string> engines = WordsOf(launch::kEngineWords);
  engines.insert(engines.begin(), "auto");
  t.Add("--engine NAME", {Kind::kWord, "auto", engines},
        "launcher; hydra is MPICH's; auto: srun inside an allocation, else that of the MPI linked "
        "here; without MPI torchrun with NCCL, else local");
  t.Add("--hosts FILE", &options.hosts,
        "a host a line, 'node1', 'node1 slots=8' or 'node1:8'; without it this host, or for srun "
        "the allocation");
  t.Add("--nodes A:B", &options.nodes,
        "fewest and most hosts of --hosts that a job runs on, the first that answer; or their "
        "number; default: all");
  t.Add("--ranks-per-node N", &options.ranks_per_node,
        "ranks of a host without slots; default on this host alone: its cores")
      .Least(0);
  t.Add("--rsh PROGRAM", &options.remote_shell,
        "starts commands on other hosts, called with a host and a command");
  t.Add("--node-timeout SECONDS", &options.node_timeout,
        "how long fewer hosts than A may answer before the end (exit 9)")
      .Least(0);
  t.Group("After a loss");
  t.Add("--max-restarts N", &options.restarts.most, "restarts; 0 = none").Least(0);
  t.Add("--restart-on-stop", &options.restarts.after_stop,
        "start again also after exit code 11, unless this command was asked to stop");
  t.Add("--restart-delay SECONDS", &options.restarts.first_pause, "pause before the first restart")
      .Least(0);
  t.Add("--launcher-timeout SECONDS", &options.launcher_timeout,
        "a launcher that goes on for so long after the ranks of this host have gone, or, with none "
        "here, after the run has ended in --save's status.json, is ended, exit code 8")
      .Above(0);
  t.Add("--requeue", Kind::kSwitch,
        "in a job of Slurm: scontrol requeue in place of a restart, for other hosts; "
        "--max-restarts counts SLURM_RESTART_COUNT");
  t.Group("Flags");
  t.Add("--dry-run", Kind::kSwitch, "print the launcher's line and stop");
  AddColorSetting(t);
  t.Add("-h, --help", Kind::kSwitch, "print this and stop");
  return t;
}

absl::Status NoCommand() {
  return absl::InvalidArgumentError(
      "no command behind '--', expected moe launch [flags] -- moe train ...");
}

// What the ranks run.
struct Work {
  std::vector<std::string> command;
  std::string checkpoints;  // folder from which a restart goes on; empty: there is none
};

// "moe" is this program. Flags of moe train are checked here, before anything starts.
absl::StatusOr<Work> WorkOf(std::vector<std::string> command, const Invocation& invocation) {
  if (command.empty()) return NoCommand();
  Work work{.command = std::move(command)};
  const bool is_moe = work.command.front() == "moe";
  char self[4096] = {};
  if (is_moe && ::readlink("/proc/self/exe", self, sizeof(self) - 1) > 0) {
    work.command.front() = self;
  }
  if (!is_moe && !absl::EndsWith(work.command.front(), "/moe")) return work;
  if (work.command.size() < 2 || work.command[1] != "train") return work;
  Table rows;
  for (const Setting& row : TrainHelp().settings) rows.Add(row);
  Settings settings(rows);
  std::vector<std::string> warnings;  // those of the ranks, which give them
  const auto flags = absl::MakeConstSpan(work.command).subspan(2);
  MOE_RETURN_IF_ERROR(LoadSettings(flags, invocation.environment, settings, warnings));
  if (settings.empty("save")) return work;
  work.checkpoints = settings.text("save");
  if (!settings.given("resume")) work.command.insert(work.command.end(), {"--resume", "auto"});
  return work;
}

struct HostRange {
  int least = 1, most = 1;
};

// Of --nodes: "4", "2:4".
absl::StatusOr<HostRange> RangeOf(const std::string& text, int hosts) {
  if (text.empty()) return HostRange{hosts, hosts};
  HostRange range;
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  const bool numbers = parts.size() <= 2 && absl::SimpleAtoi(parts.front(), &range.least) &&
                       absl::SimpleAtoi(parts.back(), &range.most);
  if (numbers && 1 <= range.least && range.least <= range.most && range.most <= hosts) return range;
  return WrongFlag("--nodes", text,
                   absl::StrCat("A or A:B with 1 <= A <= B <= ", hosts, ", the hosts of --hosts"));
}

std::string NamesOf(absl::Span<const Host> hosts) {
  return absl::StrJoin(hosts, ", ",
                       [](std::string* out, const Host& host) { absl::StrAppend(out, host.name); });
}

// Of the newest run in a --save folder; nullopt: there is none, or it cannot be read here.
std::optional<RunStatus> NewestStatus(FileSystem& files, const std::string& folder) {
  SmallFile file;
  if (folder.empty() || files.ReadSmall(StatusPathIn(folder), file)) return std::nullopt;
  auto status = ParseStatus(file.text);
  if (!status.ok()) return std::nullopt;
  return *std::move(status);
}

// Reads the status of a run on a thread of its own: a network folder that hangs must not keep the
// caller from taking signals.
class StatusReader {
 public:
  explicit StatusReader(const std::string& folder) : folder_(folder) {}

  // Blocks for at most a second; nullopt also if the read has not returned by then.
  std::optional<RunStatus> Read() {
    if (folder_.empty()) return std::nullopt;
    if (work_ == nullptr) {
      const auto read = [folder = folder_, status = status_](FileSystem& files) {
        *status = NewestStatus(files, folder);
        return absl::OkStatus();
      };
      auto work = FileWork::Start({.who = "moe launch"}, read);
      if (!work.ok()) return std::nullopt;
      work_ = *std::move(work);
    }
    if (!work_->AwaitFor(absl::Seconds(1))) return std::nullopt;
    work_ = nullptr;
    return *status_;
  }

 private:
  const std::string folder_;
  // Shared with the thread, which may outlive this object.
  const std::shared_ptr<std::optional<RunStatus>> status_ =
      std::make_shared<std::optional<RunStatus>>();
  std::unique_ptr<FileWork> work_;
};

class Launcher {
 public:
  static absl::StatusOr<Launcher> Create(const Settings& settings, const Options& options,
                                         Work work, const Invocation& invocation);

  absl::Status PrintLine() const { return Print(absl::StrCat(LineOf(job_), "\n")); }
  absl::StatusOr<ExitCode> Run();

 private:
  static std::string LineOf(const launch::Job& job) {
    return absl::StrJoin(launch::CommandLine(job), " ", [](std::string* out, const auto& word) {
      absl::StrAppend(out, ShellQuote(word));
    });
  }
  absl::Status ReadHosts();
  // The hosts of the next job. kUnauthenticated: too few answer. None: stop.
  absl::StatusOr<std::vector<Host>> AwaitHosts(launch::Supervisor& supervisor) const;
  // -1: there is none, or it cannot be read here.
  int64_t NewestCheckpoint() const;
  // Runs a job to its end.
  launch::Attempt Try(const launch::Job& job, launch::Supervisor& supervisor) const;
  void Requeue(launch::Supervisor& supervisor) const;

  Options options_;
  Work work_;
  launch::Job job_;  // with all hosts
  HostRange range_;
  std::string slurm_job_;  // for --requeue; else empty
};

absl::StatusOr<Launcher> Launcher::Create(const Settings& settings, const Options& options,
                                          Work work, const Invocation& invocation) {
  Launcher made;
  made.options_ = options;
  made.work_ = std::move(work);
  launch::Job& job = made.job_;
  const std::string slurm_job = VariableOf(invocation.environment, "SLURM_JOB_ID");
  const bool by_ssh = options.remote_shell == "ssh";
  const launch::EngineFacts facts{.linked_mpi = LinkedMpi(),
                                  .has_nccl = HasBackend(Backend::kNccl),
                                  .in_allocation = !slurm_job.empty()};
  MOE_ASSIGN_OR_RETURN(job.engine, launch::EngineFor(settings.text("engine"), facts));
  job.command = made.work_.command;
  job.remote_shell = by_ssh ? "" : options.remote_shell;
  job.pmi = LinkedMpi() == "mpich" ? "pmi2" : "pmix";
  for (const std::string& entry : invocation.environment) {
    if (absl::StartsWith(entry, "MOE_")) job.variables.push_back(entry.substr(0, entry.find('=')));
  }
  const std::string path = VariableOf(invocation.environment, "PATH");
  const bool of_mpi = job.engine == Engine::kMpirun || job.engine == Engine::kHydra;
  const std::string name(NameOf(job.engine, launch::kEngineWords));
  job.program = of_mpi ? FindMpiLauncher(path) : FindProgram(name, path);
  if (job.program.empty() && job.engine != Engine::kLocal) {
    return absl::UnimplementedError(absl::StrCat("--engine ", name, ": no ", name, " in PATH"));
  }
  if (settings.on("requeue")) {
    if (slurm_job.empty()) {
      return absl::InvalidArgumentError("--requeue: SLURM_JOB_ID is not set: no job of Slurm");
    }
    made.slurm_job_ = slurm_job;
    launch::RestartOptions& restarts = made.options_.restarts;
    const std::string before = VariableOf(invocation.environment, "SLURM_RESTART_COUNT");
    (void)absl::SimpleAtoi(before, &restarts.already);
    if (restarts.already > 0) {
      restarts.note =
          launch::ReadRequeueNote(made.work_.checkpoints, slurm_job, made.NewestCheckpoint());
    }
  }
  MOE_RETURN_IF_ERROR(made.ReadHosts());
  made.options_.restarts.nine_is_loss = !job.hosts.empty();
  return made;
}

absl::Status Launcher::ReadHosts() {
  job_.ranks_per_node = options_.ranks_per_node;
  if (options_.hosts.empty()) {
    if (job_.engine == Engine::kLocal && job_.ranks_per_node > 0) {
      return WrongFlag("--ranks-per-node", absl::StrCat(job_.ranks_per_node),
                       "moe train --ranks in its place with --engine local");
    }
    if (!options_.nodes.empty()) return WrongFlag("--nodes", options_.nodes, "--hosts with it");
    if (job_.ranks_per_node == 0 && job_.engine != Engine::kSrun) {
      job_.ranks_per_node = UsableCpus();
    }
    return absl::OkStatus();
  }
  if (!launch::TraitsOf(job_.engine).reaches_hosts) {
    return WrongFlag("--hosts", options_.hosts,
                     "an engine that reaches other hosts: mpirun or hydra");
  }
  const auto file = MappedFile::Open(options_.hosts);
  MOE_RETURN_IF_ERROR(InputError("--hosts", file.status()));
  const auto bytes = file->bytes();
  auto hosts = launch::ParseHosts({reinterpret_cast<const char*>(bytes.data()), bytes.size()});
  if (!hosts.ok()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--hosts: ", options_.hosts, ": ", hosts.status().message()));
  }
  job_.hosts = *std::move(hosts);
  for (Host& host : job_.hosts) {
    if (host.slots == 0) host.slots = options_.ranks_per_node;
    if (host.slots > 0) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--hosts: ", host.name, " has no slots, expected 'slots=N' or --ranks-per-node N"));
  }
  MOE_ASSIGN_OR_RETURN(range_, RangeOf(options_.nodes, static_cast<int>(job_.hosts.size())));
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Host>> Launcher::AwaitHosts(launch::Supervisor& supervisor) const {
  std::vector<std::string> probe = {options_.remote_shell};
  if (job_.remote_shell.empty()) {
    probe.insert(probe.end(),
                 {"-o", "BatchMode=yes", "-o", absl::StrCat("ConnectTimeout=", kProbeSeconds)});
    // The connection that ssh may keep for later calls would be a process that the job has left.
    probe.insert(probe.end(), {"-o", "ControlMaster=no", "-o", "ControlPath=none"});
  }
  const absl::Time deadline = absl::Now() + options_.node_timeout;
  for (std::vector<std::string> told; !supervisor.stopping();) {
    std::vector<std::string> silent;
    std::vector<Host> hosts = launch::HostsThatAnswer(job_.hosts, probe, kProbeSeconds, silent);
    if (silent != told && !silent.empty()) {
      Say(stderr, "moe launch: no answer from {}\n", absl::StrJoin(silent, ", "));
      told = silent;
    }
    if (hosts.size() >= static_cast<size_t>(range_.least)) {
      hosts.resize(std::min(hosts.size(), static_cast<size_t>(range_.most)));
      return hosts;
    }
    if (absl::Now() >= deadline) {
      return absl::UnauthenticatedError(absl::StrCat(
          hosts.size(), " of ", job_.hosts.size(), " hosts answer (", NamesOf(hosts),
          "), expected ", range_.least, " within ", absl::FormatDuration(options_.node_timeout)));
    }
    supervisor.Pause(absl::Seconds(kProbeSeconds));
  }
  return std::vector<Host>();
}

int64_t Launcher::NewestCheckpoint() const {
  const auto found = FindCheckpoint(work_.checkpoints);
  return found.ok() && !found->path.empty() ? found->step : -1;
}

launch::Attempt Launcher::Try(const launch::Job& job, launch::Supervisor& supervisor) const {
  const auto before = NewestStatus(RealFileSystem(), work_.checkpoints);
  const auto is_of_job = [&](const std::optional<RunStatus>& newest) {
    return newest.has_value() &&
           !(before.has_value() && before->process.run == newest->process.run);
  };
  StatusReader reader(work_.checkpoints);
  const auto over = [&] {
    const auto now = reader.Read();
    return is_of_job(now) && now->state != RunState::kRunning;
  };
  const absl::Time begin = absl::Now();
  const auto ending = supervisor.Run(launch::CommandLine(job), launch::TraitsOf(job.engine),
                                     options_.launcher_timeout, over);
  launch::Attempt attempt = {.code = ending.code, .ran = absl::Now() - begin};
  if (ending.ended) {
    Say(stderr, "moe launch: {} went on for {} after its ranks, and was ended\n", job.program,
        absl::FormatDuration(options_.launcher_timeout));
  }
  if (work_.checkpoints.empty()) return attempt;
  const auto after = NewestStatus(RealFileSystem(), work_.checkpoints);
  attempt.code =
      launch::CodeOfRun(ending.code, job.engine, is_of_job(after) ? after : std::nullopt);
  attempt.newest = NewestCheckpoint();
  return attempt;
}

void Launcher::Requeue(launch::Supervisor& supervisor) const {
  auto requeue = launch::Process::Start(std::vector<std::string>{"scontrol", "requeue", slurm_job_},
                                        launch::Process::Output::kShared);
  if (requeue.WaitUntil(absl::Now() + absl::Minutes(1)).value_or(1) != 0) {
    Say(stderr, "moe launch: scontrol requeue {} failed\n", slurm_job_);
    return;
  }
  supervisor.Pause(absl::Minutes(1));  // until Slurm ends this job
}

absl::StatusOr<ExitCode> Launcher::Run() {
  launch::Supervisor supervisor;
  launch::Restarts restarts(options_.restarts, NewestCheckpoint());
  for (launch::Job job = job_;;) {
    if (!job_.hosts.empty()) {
      MOE_ASSIGN_OR_RETURN(job.hosts, AwaitHosts(supervisor));
      if (job.hosts.empty()) return ExitCode::kStopped;
    }
    supervisor.Pause(absl::ZeroDuration());
    if (supervisor.stopping()) return ExitCode::kStopped;
    Say(stderr, "moe launch: {}\n", LineOf(job));
    const launch::Attempt attempt = Try(job, supervisor);
    const auto code = static_cast<ExitCode>(attempt.code);
    supervisor.Pause(absl::ZeroDuration());  // what came since
    if (supervisor.stopping() || code == ExitCode::kOk) return code;
    auto verdict = restarts.After(attempt);
    const std::string ended = absl::StrCat("exit code ", attempt.code, ": ", verdict.reason);
    if (!verdict.again || work_.checkpoints.empty()) {
      Say(stderr, "moe launch: {}{}\n", ended,
          verdict.again ? "; without moe train --save there is nothing to go on from" : "");
      return code;
    }
    Say(stderr, "moe launch: {}; restart {} of {} in {}, {}\n", ended, restarts.count(),
        options_.restarts.most, absl::FormatDuration(verdict.pause),
        attempt.newest < 0 ? "from the beginning" : absl::StrCat("from step ", attempt.newest));
    if (!slurm_job_.empty()) {
      const absl::Status noted =
          launch::WriteRequeueNote(work_.checkpoints, slurm_job_, attempt.newest, restarts.note());
      if (!noted.ok()) Say(stderr, "moe launch: {}\n", std::string(noted.message()));
      Requeue(supervisor);
      return code;
    }
    supervisor.Pause(verdict.pause);
    if (supervisor.stopping()) return code;
  }
}

absl::StatusOr<ExitCode> Run(const Invocation& invocation) {
  const auto separator = std::find(invocation.args.begin(), invocation.args.end(), "--");
  const bool separated = separator != invocation.args.end();
  if (!separated && !invocation.args.empty() && !absl::StartsWith(invocation.args.front(), "-")) {
    return NoCommand();
  }
  Options options;
  const Table rows = LaunchSettings(options);
  Settings settings(rows);
  MOE_RETURN_IF_ERROR(
      LoadFlags(std::vector<std::string>(invocation.args.begin(), separator), settings));
  if (settings.on("help")) {
    MOE_RETURN_IF_ERROR(PrintOnce(invocation, HelpText(LaunchHelp())));
    return ExitCode::kOk;
  }
  MOE_RETURN_IF_ERROR(Fill(settings, rows));
  if (invocation.launch.source != LaunchSource::kNone) {
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(invocation.launch.source),
                     " is set: a launcher started this; moe launch starts one "
                     "itself: ",
                     HowToUnset(invocation.launch.source)));
  }
  std::vector<std::string> command;
  if (separated) command.assign(separator + 1, invocation.args.end());
  MOE_ASSIGN_OR_RETURN(Work work, WorkOf(std::move(command), invocation));
  MOE_ASSIGN_OR_RETURN(Launcher launcher,
                       Launcher::Create(settings, options, std::move(work), invocation));
  if (!settings.on("dry-run")) return launcher.Run();
  MOE_RETURN_IF_ERROR(launcher.PrintLine());
  return ExitCode::kOk;
}

}  // namespace

CommandHelp LaunchHelp() {
  Options options;
  return {.head = kHead, .settings = LaunchSettings(options).Unbound().rows(), .tail = kTail};
}

ExitCode LaunchCommand(const Invocation& invocation) {
  const auto code = Run(invocation);
  return code.ok() ? *code : EndCommand(invocation, "launch", code.status());
}

}  // namespace moe::cli
