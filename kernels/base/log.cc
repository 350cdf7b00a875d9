#include "kernels/base/log.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <mutex>
#include <set>
#include <string>

#include "kernels/base/printable.h"

namespace moe {
namespace {

void ToStderr(LogLevel level, absl::string_view message) {
  const char* const prefix = level == LogLevel::kInfo      ? ""
                             : level == LogLevel::kWarning ? "warning: "
                                                           : "error: ";
  std::fprintf(stderr, "moe: %s%s\n", prefix, Printable(message).c_str());
}

std::atomic<LogCallback> callback = ToStderr;

struct Said {
  std::mutex mu;
  std::set<std::string, std::less<>> messages;  // guarded by mu
};
Said& SaidOnce() {
  static auto* const said = new Said;  // never destroyed: threads may still log
  return *said;
}

}  // namespace

void SetLogCallback(LogCallback replacement) {
  callback.store(replacement != nullptr ? replacement : ToStderr);
  const std::lock_guard<std::mutex> lock(SaidOnce().mu);
  SaidOnce().messages.clear();
}

void Log(LogLevel level, absl::string_view message) {
  callback.load()(level, message);
}

void LogOnce(LogLevel level, absl::string_view message) {
  {
    const std::lock_guard<std::mutex> lock(SaidOnce().mu);
    if (!SaidOnce().messages.insert(std::string(message)).second) return;
  }
  Log(level, message);
}

}  // namespace moe
