#include "moe/cli/launch/process.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <map>
#include <sstream>
#include <system_error>
#include <vector>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

namespace moe::launch {
namespace {

constexpr int kNotFound = 127;  // as shells have it

int CodeOf(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

std::string FileOf(pid_t process, const char* name) {
  std::ifstream file(absl::StrCat("/proc/", process, "/", name), std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();  // throws nothing if the process ends meanwhile, as iterators would
  return text.str();
}

// Children by parent, zombies left out.
std::multimap<pid_t, pid_t> ReadProcesses() {
  std::multimap<pid_t, pid_t> children;
  std::error_code error;
  for (std::filesystem::directory_iterator entry("/proc", error), end; !error && entry != end;
       entry.increment(error)) {
    pid_t process = 0;
    if (!absl::SimpleAtoi(entry->path().filename().string(), &process)) continue;
    // "12 (name) S 1 ...": the name may have spaces and parentheses.
    const std::string stat = FileOf(process, "stat");
    const std::vector<absl::string_view> fields =
        absl::StrSplit(absl::string_view(stat).substr(std::min(stat.rfind(')'), stat.size())), ' ');
    pid_t parent = 0;
    if (fields.size() < 3 || fields[1] == "Z" || !absl::SimpleAtoi(fields[2], &parent)) continue;
    children.emplace(parent, process);
  }
  return children;
}

bool HasVariable(pid_t process, absl::string_view variable) {
  const std::string text = absl::StrCat(std::string(1, '\0'), FileOf(process, "environ"));
  return absl::StrContains(text, absl::StrCat(std::string(1, '\0'), variable, "="));
}

}  // namespace

Process Process::Start(absl::Span<const std::string> argv, Output output) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  const pid_t parent = ::getpid();
  const pid_t id = ::fork();
  if (id != 0) return Process(std::max<pid_t>(id, 0));
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGTERM);
  if (::getppid() != parent) ::_exit(kNotFound);  // it died before the line above
  sigset_t none;
  sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  for (const int ignored : {SIGPIPE, SIGXFSZ}) std::signal(ignored, SIG_DFL);
  const int nothing = ::open("/dev/null", O_RDWR);
  ::dup2(nothing, STDIN_FILENO);
  if (output == Output::kNone) {
    ::dup2(nothing, STDOUT_FILENO);
    ::dup2(nothing, STDERR_FILENO);
  }
  if (nothing > STDERR_FILENO) ::close(nothing);
  ::execvp(words[0], words.data());
  ::_exit(kNotFound);
}

Process::~Process() {
  if (!started()) return;
  KillGroup();
  WaitUntil(absl::Now() + kLongestKill);
}

std::optional<int> Process::Ended() {
  if (!started()) return kNotFound;
  int status = 0;
  const pid_t ended = ::waitpid(id_, &status, WNOHANG);
  if (ended == 0 || (ended < 0 && errno == EINTR)) return std::nullopt;
  id_ = 0;
  return ended < 0 ? kNotFound : CodeOf(status);
}

std::optional<int> Process::WaitUntil(absl::Time deadline) {
  for (;;) {
    if (const auto code = Ended(); code.has_value()) return code;
    if (absl::Now() >= deadline) return std::nullopt;
    absl::SleepFor(absl::Milliseconds(20));
  }
}

void Process::Signal(int signal) const {
  if (started()) ::kill(id_, signal);
}

void Process::KillGroup() const {
  if (started()) ::kill(-id_, SIGKILL);
}

std::vector<pid_t> DescendantsOf(pid_t ancestor) {
  const std::multimap<pid_t, pid_t> children = ReadProcesses();
  std::vector<pid_t> found = {ancestor};
  for (size_t i = 0; i < found.size(); ++i) {
    const auto [first, last] = children.equal_range(found[i]);
    for (auto child = first; child != last; ++child) found.push_back(child->second);
  }
  found.erase(found.begin());
  return found;
}

std::vector<pid_t> DescendantsWith(absl::string_view variable, pid_t ancestor) {
  std::vector<pid_t> found = DescendantsOf(ancestor);
  const auto without = [&](pid_t process) {
    return !HasVariable(process, variable);
  };
  found.erase(std::remove_if(found.begin(), found.end(), without), found.end());
  return found;
}

bool Catches(pid_t process, int signal) {
  const std::string kKey = "\nSigCgt:\t";
  const std::string status = FileOf(process, "status");
  const size_t at = status.find(kKey);
  uint64_t caught = 0;
  return at != std::string::npos &&
         absl::SimpleHexAtoi(absl::string_view(status).substr(at + kKey.size(), 16), &caught) &&
         (caught >> (signal - 1) & 1) != 0;
}

}  // namespace moe::launch
