// What standard error is, and how to write numbers on it.
#ifndef MOE_MOE_CLI_TERMINAL_H_
#define MOE_MOE_CLI_TERMINAL_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "moe/cli/settings.h"

namespace moe::cli {

struct Terminal {
  bool present = false;  // a refreshed line makes sense
  bool color = false;
  size_t columns = 80;
};

// Of standard error. color: --color always, or auto on a terminal without NO_COLOR.
Terminal StderrTerminal(const Settings& settings);

// "1,234,567".
std::string WithCommas(int64_t value);
// "00:01:02".
std::string ClockText(double seconds);
// "1.23 GB", "45 kB": powers of 1000.
std::string BytesText(double bytes);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_TERMINAL_H_
