#include "moe/cli/base/terminal.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>

#include <absl/strings/match.h>
#include <absl/strings/str_cat.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "kernels/base/printable.h"

namespace moe::cli {
namespace {

enum class When : uint8_t { kAuto, kAlways, kNever };
std::atomic<When> when_colored = When::kAuto;  // ranks print errors

bool HasColor(std::FILE* out) {
  if (when_colored != When::kAuto) return when_colored == When::kAlways;
  const char* const no_color = std::getenv("NO_COLOR");
  const char* const kind = std::getenv("TERM");
  return ::isatty(::fileno(out)) != 0 && (no_color == nullptr || *no_color == '\0') &&
         (kind == nullptr || std::string(kind) != "dumb");
}

std::string Colored(absl::string_view text, Color color) {
  return absl::StrCat("\033[", static_cast<int>(color), "m", text, "\033[0m");
}

}  // namespace

void SetColor(absl::string_view when) {
  when_colored = when == "always" ? When::kAlways : when == "never" ? When::kNever : When::kAuto;
}

std::string Painted(absl::string_view text, Color color, std::FILE* out) {
  return HasColor(out) ? Colored(text, color) : std::string(text);
}

std::string TextFor(std::FILE* out, std::string text) {
  return ::isatty(::fileno(out)) != 0 ? Printable(text) : text;
}

Terminal StderrTerminal() {
  Terminal terminal;
  const char* const kind = std::getenv("TERM");
  terminal.present =
      ::isatty(STDERR_FILENO) != 0 && (kind == nullptr || std::string(kind) != "dumb");
  winsize size = {};
  if (terminal.present && ::ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  terminal.color = HasColor(stderr);
  return terminal;
}

void StatusLine::Show(const std::string& text) {
  const std::string shown = terminal_.color ? Colored(text, Color::kCyan) : text;
  is_open_ = terminal_.present;
  if (is_open_) {
    Say(out_, "\r{}\033[K", shown);
  } else {
    Say(out_, "{}\n", shown);
  }
  std::fflush(out_);
}

void StatusLine::End() {
  if (is_open_) std::fputs("\n", out_);
  is_open_ = false;
}

std::string WithCommas(int64_t value) {
  std::string digits = fmt::format("{}", value);
  const size_t first = value < 0 ? 1 : 0;
  for (size_t end = digits.size(); end > first + 3; end -= 3) digits.insert(end - 3, 1, ',');
  return digits;
}

std::string Counted(int64_t count, absl::string_view thing) {
  const char* const end = count == 1 ? "" : absl::EndsWith(thing, "ch") ? "es" : "s";
  return absl::StrCat(WithCommas(count), " ", thing, end);
}

std::string ClockText(double seconds) {
  const auto whole = static_cast<int64_t>(std::llround(std::max(0.0, seconds)));
  return fmt::format("{:02}:{:02}:{:02}", whole / 3600, whole / 60 % 60, whole % 60);
}

std::string BytesText(double bytes) {
  constexpr const char* kUnits[] = {"B", "kB", "MB", "GB", "TB", "PB"};
  size_t unit = 0;
  while (bytes >= 999.5 && unit + 1 < std::size(kUnits)) {
    bytes /= 1000;
    ++unit;
  }
  if (unit == 0) return fmt::format("{:.0f} B", bytes);
  return fmt::format("{:.{}f} {}", bytes, bytes < 9.995 ? 2 : bytes < 99.95 ? 1 : 0, kUnits[unit]);
}

}  // namespace moe::cli
