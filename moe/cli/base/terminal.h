// Properties of the program's streams, and how words and numbers are written to them.
#ifndef MOE_MOE_CLI_BASE_TERMINAL_H_
#define MOE_MOE_CLI_BASE_TERMINAL_H_

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include <absl/strings/string_view.h>
#include <fmt/format.h>

namespace moe::cli {

struct Terminal {
  bool present = false;  // a refreshed line makes sense
  bool color = false;
  size_t columns = 80;
};

// Terminal of standard error. color: as for Painted.
Terminal StderrTerminal();

// Sets --color for all that this process prints from here on; "auto" until then.
void SetColor(absl::string_view when);

enum class Color : uint8_t { kRed = 31, kGreen = 32, kYellow = 33, kCyan = 36 };

// `text` for `out`: in colour by --color always, or auto on a terminal without NO_COLOR.
std::string Painted(absl::string_view text, Color color, std::FILE* out);

// Text of untrusted bytes for `out`: on a terminal Printable (kernels/base/printable.h); a pipe or
// a file has the bytes as they are.
std::string TextFor(std::FILE* out, std::string text);

// As fmt::print, for text that is not worth failing a run: what cannot be written is left out.
template <typename... Args>
void Say(std::FILE* out, fmt::format_string<Args...> format, Args&&... args) {
  std::fputs(fmt::format(format, std::forward<Args>(args)...).c_str(), out);
}

// Line that shows the progress of a command: refreshed in place on a terminal, otherwise a line for
// each text. Not thread-safe.
class StatusLine {
 public:
  StatusLine(const Terminal& terminal, std::FILE* out) : terminal_(terminal), out_(out) {}
  ~StatusLine() { End(); }
  StatusLine(const StatusLine&) = delete;
  StatusLine& operator=(const StatusLine&) = delete;

  void Show(const std::string& text);
  // Ends a refreshed line, so that other output starts on a line of its own.
  void End();
  const Terminal& terminal() const { return terminal_; }

 private:
  const Terminal terminal_;
  std::FILE* const out_;
  bool is_open_ = false;
};

// "1,234,567".
std::string WithCommas(int64_t value);
// "1 rank", "1,234 ranks", "2 micro-batches".
std::string Counted(int64_t count, absl::string_view thing);
// "00:01:02".
std::string ClockText(double seconds);
// "1.23 GB", "45 kB": powers of 1000.
std::string BytesText(double bytes);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_TERMINAL_H_
