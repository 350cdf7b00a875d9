#include "moe/cli/launch/hosts.h"

#include <algorithm>
#include <optional>

#include <absl/status/status.h>
#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <absl/time/time.h>
#include <unistd.h>

#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/launch/process.h"

namespace moe::launch {
namespace {

absl::Status WrongLine(int line, absl::string_view what) {
  return absl::InvalidArgumentError(
      absl::StrCat("line ", line, ": ", Printable(what),
                   ", expected a host, as 'node1', 'node1 slots=8' or 'node1:8'"));
}

absl::StatusOr<Host> ParseHost(absl::string_view text, int line) {
  const std::vector<absl::string_view> words =
      absl::StrSplit(text, absl::ByAnyChar(" \t"), absl::SkipEmpty());
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(words.front(), absl::MaxSplits(':', 1));
  Host host{.name = std::string(parts.first)};
  std::optional<absl::string_view> slots;
  if (words.front().size() > parts.first.size()) slots = parts.second;
  for (size_t i = 1; i < words.size(); ++i) {
    absl::string_view value = words[i];
    if (absl::ConsumePrefix(&value, "slots=")) {
      slots = value;
    } else if (!absl::ConsumePrefix(&value, "max_slots=") &&
               !absl::ConsumePrefix(&value, "max-slots=")) {
      return WrongLine(line, absl::StrCat("'", value, "'"));
    }
  }
  // A name that begins with '-' would be an option of ssh.
  if (host.name.empty() || host.name.front() == '-')
    return WrongLine(line, absl::StrCat("'", text, "'"));
  if (slots.has_value() && (!absl::SimpleAtoi(*slots, &host.slots) || host.slots < 1)) {
    return WrongLine(line, absl::StrCat("slots are '", *slots, "'"));
  }
  return host;
}

bool IsThisHost(absl::string_view name) {
  char own[256] = {};
  if (::gethostname(own, sizeof(own) - 1) != 0) own[0] = 0;
  return name == "localhost" || name == "127.0.0.1" || name == own;
}

}  // namespace

absl::StatusOr<std::vector<Host>> ParseHosts(absl::string_view text) {
  std::vector<Host> hosts;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line.substr(0, line.find('#')));
    if (line.empty()) continue;
    MOE_ASSIGN_OR_RETURN(Host host, ParseHost(line, number));
    const auto same = [&](const Host& other) {
      return other.name == host.name;
    };
    if (std::any_of(hosts.begin(), hosts.end(), same)) {
      return WrongLine(number, absl::StrCat("'", host.name, "' is there already"));
    }
    hosts.push_back(std::move(host));
  }
  if (hosts.empty()) return absl::InvalidArgumentError("no host in it, expected one a line");
  return hosts;
}

std::vector<Host> HostsThatAnswer(absl::Span<const Host> hosts,
                                  absl::Span<const std::string> command, int seconds,
                                  std::vector<std::string>& silent) {
  std::vector<Process> probes(hosts.size());
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (command.empty() || IsThisHost(hosts[i].name)) continue;
    std::vector<std::string> probe(command.begin(), command.end());
    probe.insert(probe.end(), {hosts[i].name, "true"});
    probes[i] = Process::Start(probe, Process::Output::kNone);
  }
  const absl::Time deadline = absl::Now() + absl::Seconds(seconds);
  std::vector<Host> answered;
  for (size_t i = 0; i < hosts.size(); ++i) {
    const int code = probes[i].started() ? probes[i].WaitUntil(deadline).value_or(-1) : 0;
    if (code == 0) {
      answered.push_back(hosts[i]);
    } else {
      silent.push_back(hosts[i].name);
    }
  }
  return answered;
}

}  // namespace moe::launch
