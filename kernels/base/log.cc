#include "kernels/base/log.h"

#include <atomic>
#include <cstdio>

namespace moe {
namespace {

void ToStderr(LogLevel level, absl::string_view message) {
  const char* const prefix = level == LogLevel::kInfo      ? ""
                             : level == LogLevel::kWarning ? "warning: "
                                                           : "error: ";
  std::fprintf(stderr, "moe: %s%.*s\n", prefix, static_cast<int>(message.size()), message.data());
}

std::atomic<LogCallback> callback = ToStderr;

}  // namespace

void SetLogCallback(LogCallback replacement) {
  callback.store(replacement != nullptr ? replacement : ToStderr);
}

void Log(LogLevel level, absl::string_view message) {
  callback.load()(level, message);
}

}  // namespace moe
