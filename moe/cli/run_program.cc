
#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>
#include <utility>
#include <vector>

#include <absl/algorithm/container.h>
#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "kernels/base/caught.h"
#include "kernels/grouped_gemm/simd_targets.h"
#include "moe/cli/base/command.h"
#include "moe/cli/base/launch.h"
#include "moe/cli/base/program.h"
#include "moe/cli/base/provenance.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/completion/completion.h"

namespace moe::cli {
namespace {

std::string Help() {
  std::string text =
      "usage: moe COMMAND [flags]\n\n"
      "Mixture-of-experts layers whose experts are sharded over ranks.\n\n";
  for (const Command& c : Commands()) text += fmt::format("  {:<11} {}\n", c.name, c.summary);
  return text +
         "\n"
         "  moe doctor\n"
         "  moe train --data book.txt --ranks 4 --ep 2 --num-experts 8 --topk 2 --out run\n"
         "  mpirun -n 4 moe bench alltoall -J alltoall.json\n"
         "  moe report run alltoall.json\n"
         "\n"
         "moe COMMAND --help has flags, defaults and formulas of a command; moe --version.\n";
}

// The first line is for scripts: "moe 1.2.3".
std::string VersionText() {
  std::string text = absl::StrCat("moe ", MOE_VERSION, "\n");
  for (const auto& [key, value] : BuildFacts()) {
    if (key != "version") text += fmt::format("{:<9} {}\n", key, value);
  }
  return text;
}

const Command* Find(const std::string& name) {
  for (const Command& c : Commands()) {
    if (name == c.name) return &c;
  }
  return nullptr;
}

// `environment` without variables of flags that only other commands have: it is no mistake that
// this one does not have them.
std::vector<std::string> WithoutOthers(std::vector<std::string> environment,
                                       const Command& command) {
  const auto of_another = [&](const std::string& entry) {
    if (!absl::StartsWith(entry, "MOE_")) return false;
    const std::string name = entry.substr(0, entry.find('='));
    if (FindVariable(command.help().settings, name) != nullptr) return false;
    return absl::c_any_of(Commands(), [&](const Command& other) {
      return FindVariable(other.help().settings, name) != nullptr;
    });
  };
  environment.erase(std::remove_if(environment.begin(), environment.end(), of_another),
                    environment.end());
  return environment;
}

absl::Status UnknownCommand(const std::string& name) {
  std::vector<std::string> names = {"help"};
  for (const Command& c : Commands()) names.emplace_back(c.name);
  return absl::InvalidArgumentError(
      absl::StrCat("unknown command '", name, "'",
                   DidYouMean(name, names, "", "; moe --help lists all commands")));
}

ExitCode Main(Invocation invocation) {
  const auto end = [&](const absl::Status& status) {
    return EndCommand(invocation, "", status);
  };
  if (const absl::Status status = gemm::UseSimdTargetOfEnvironment(); !status.ok()) {
    return end(status);
  }
  if (invocation.args.empty()) {
    return end(absl::InvalidArgumentError("no command, expected moe COMMAND; see moe --help"));
  }
  std::string name = invocation.args.front();
  invocation.args.erase(invocation.args.begin());
  if (name == kCompleteName) return end(PrintOnce(invocation, Complete(invocation.args)));
  if (name == "--version") {
    return end(PrintOnce(invocation, VersionText()));
  }
  if (name == "help" && !invocation.args.empty()) {
    name = invocation.args.front();
    invocation.args = {"--help"};
  }
  if (name == "help" || name == "--help" || name == "-h") return end(PrintOnce(invocation, Help()));
  const Command* const command = Find(name);
  if (command == nullptr) return end(UnknownCommand(name));
  try {
    invocation.environment = WithoutOthers(std::move(invocation.environment), *command);
    return command->run(invocation);
  } catch (...) {
    return EndCommand(invocation, command->name, StatusOfException());
  }
}

// Writes one line, that of the first thread that arrives, and ends. Safe in a signal handler.
[[noreturn]] void LeaveWith(absl::string_view line, ExitCode code) {
  static std::atomic<bool> said = false;
  while (said.exchange(true)) ::pause();  // another thread is leaving
  (void)!::write(STDERR_FILENO, line.data(), line.size());
  ::_exit(static_cast<int>(code));
}

// Destructors and noexcept functions of libraries allocate, too, and nothing catches what they
// throw.
[[noreturn]] void LeaveWithoutMemory() {
  const absl::Status status =
      std::current_exception() != nullptr ? StatusOfException() : absl::OkStatus();
  if (!absl::IsResourceExhausted(status)) std::abort();
  LeaveWith("moe: out of memory\n", ExitCode::kMemory);
}

// A standard stream that is closed must not become the first file that is opened.
void OpenStandardStreams() {
  for (int stream = STDIN_FILENO; stream <= STDERR_FILENO; ++stream) {
    if (::fcntl(stream, F_GETFD) < 0 && errno == EBADF) ::open("/dev/null", O_RDWR);
  }
}

// Signal handler for a mapped file that is shortened while it is read, or whose disk fails.
void EndOnLostBytes(int) {
  LeaveWith(
      "moe: a file became shorter while it was read, or its disk failed (SIGBUS): replace files by "
      "renaming\n",
      ExitCode::kIo);
}

}  // namespace

int RunProgram(int argc, char** argv) {
  OpenStandardStreams();
  std::set_terminate(LeaveWithoutMemory);
  // A write that fails returns its error: a file at its limit, a pipe that nobody reads.
  std::signal(SIGXFSZ, SIG_IGN);
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGBUS, EndOnLostBytes);
  try {
    Invocation invocation;
    invocation.program = argc > 0 ? argv[0] : "moe";
    invocation.args.assign(argv + (argc > 0 ? 1 : 0), argv + argc);
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      if (!absl::StartsWith(*entry, absl::StrCat(gemm::kSimdVariable, "="))) {  // no flag's
        invocation.environment.emplace_back(*entry);
      }
    }
    const auto launch = LaunchOf(invocation.environment);
    if (launch.ok()) invocation.launch = *launch;
    return static_cast<int>(Main(std::move(invocation)));
  } catch (...) {  // there is no memory even for the words
    const absl::Status status = StatusOfException();
    std::fprintf(stderr, "moe: %.*s\n", static_cast<int>(status.message().size()),
                 status.message().data());
    return static_cast<int>(ExitCodeOf(status));
  }
}

absl::Span<const Command> Commands() {
  static constexpr Command kCommands[] = {
      {"train", "trains a mixture-of-experts language model on text files", TrainCommand,
       TrainHelp},
      {"eval", "tells the loss of a text under a checkpoint", EvalCommand, EvalHelp},
      {"generate", "goes on from a prompt with a checkpoint", GenerateCommand, GenerateHelp},
      {"sweep", "measures every combination of experts, top-k, capacity factor ...", SweepCommand,
       SweepHelp},
      {"plan", "finds layouts by predicted step time and memory", PlanCommand, PlanHelp},
      {"bench", "times and checks collectives and layers, even and skewed", BenchCommand,
       BenchHelp},
      {"layer", "runs one MoE layer of a public model, from its own files", LayerCommand,
       LayerHelp},
      {"verify", "compares any layout with one rank, and one rank with float64", VerifyCommand,
       VerifyHelp},
      {"report", "draws what the others measured: one HTML file with charts", ReportCommand,
       ReportHelp},
      {"ckpt", "lists, checks, compares, removes and exports checkpoints", CkptCommand, CkptHelp},
      {"launch", "starts a command on several hosts, and again after a loss", LaunchCommand,
       LaunchHelp},
      {"status", "tells where runs of moe train are: step, speed, what ended them", StatusCommand,
       StatusHelp},
      {"debug", "compares what the ranks of a failed run did last", DebugCommand, DebugHelp},
      {"doctor", "tells what this build and machine have, and what will be slow", DoctorCommand,
       DoctorHelp},
      {"completion", "completes commands, flags and their values in a shell", CompletionCommand,
       CompletionHelp},
  };
  return kCommands;
}

}  // namespace moe::cli
