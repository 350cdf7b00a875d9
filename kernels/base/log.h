// The library's few log lines. Programs install a callback; the default is stderr.
#ifndef MOE_KERNELS_BASE_LOG_H_
#define MOE_KERNELS_BASE_LOG_H_

#include <cstdint>

#include <absl/strings/string_view.h>

namespace moe {

enum class LogLevel : uint8_t { kInfo, kWarning, kError };

using LogCallback = void (*)(LogLevel level, absl::string_view message);

// Thread-safe. nullptr restores the default. The callback may be called from any thread.
void SetLogCallback(LogCallback callback);
void Log(LogLevel level, absl::string_view message);
// Logs each message once since SetLogCallback: for messages that every layer would repeat.
void LogOnce(LogLevel level, absl::string_view message);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_LOG_H_
