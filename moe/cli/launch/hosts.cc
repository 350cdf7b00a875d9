#include "moe/cli/launch/hosts.h"

#include <algorithm>
#include <optional>
#include <utility>

#include <absl/status/status.h>
#include <absl/strings/ascii.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_split.h>
#include <absl/strings/strip.h>
#include <absl/time/time.h>

#include "comm/hosts.h"
#include "kernels/base/printable.h"
#include "kernels/base/status_macros.h"
#include "moe/cli/launch/process.h"

namespace moe::launch {
namespace {

constexpr int kMostSlots = 1 << 16;
constexpr size_t kProbesAtOnce = 64;

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
  // What launchers and ssh take for anything but a name would start something else.
  const auto is_of_name = [](char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_';
  };
  if (host.name.empty() || host.name.front() == '-' ||
      !std::all_of(host.name.begin(), host.name.end(), is_of_name)) {
    return WrongLine(line, absl::StrCat("'", text, "'"));
  }
  if (slots.has_value() &&
      (!absl::SimpleAtoi(*slots, &host.slots) || host.slots < 1 || host.slots > kMostSlots)) {
    return WrongLine(line, absl::StrCat("slots are '", *slots, "'"));
  }
  return host;
}

bool IsThisHost(absl::string_view name) {
  return name == "localhost" || name == "127.0.0.1" || name == HostName();
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
  std::vector<Host> answered;
  for (size_t first = 0; first < hosts.size(); first += kProbesAtOnce) {
    const auto some = hosts.subspan(first, kProbesAtOnce);
    std::vector<Process> probes(some.size());
    for (size_t i = 0; i < some.size(); ++i) {
      if (IsThisHost(some[i].name)) continue;
      std::vector<std::string> probe(command.begin(), command.end());
      probe.insert(probe.end(), {some[i].name, "true"});
      probes[i] = Process::Start(probe, Process::Output::kNone);
    }
    const absl::Time deadline = absl::Now() + absl::Seconds(seconds);
    for (size_t i = 0; i < some.size(); ++i) {
      const bool answers =
          IsThisHost(some[i].name) || (probes[i].started() && probes[i].WaitUntil(deadline) == 0);
      if (answers) {
        answered.push_back(some[i]);
      } else {
        silent.push_back(some[i].name);
      }
    }
  }
  return answered;
}

}  // namespace moe::launch
