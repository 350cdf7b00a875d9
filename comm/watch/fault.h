// Faults that tests inject into a run.
#ifndef MOE_COMM_WATCH_FAULT_H_
#define MOE_COMM_WATCH_FAULT_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "comm/site.h"
#include "kernels/base/choice.h"

namespace moe {

enum class FaultKind : uint8_t {
  kThrow,
  kExit,
  kKill,
  kSegv,
  kHang,
  kStop,
  kSlow,
  kNaN,
  kInfinity,
  kNegativeInfinity
};
inline constexpr Choice<FaultKind> kFaultKindWords[] = {
    {"throw", FaultKind::kThrow},  // an exception in the rank's thread
    {"exit", FaultKind::kExit},    // _exit(kFaultExitCode) of the process
    {"kill", FaultKind::kKill},    // SIGKILL of the process
    {"segv", FaultKind::kSegv},    // SIGSEGV of the process
    {"hang", FaultKind::kHang},    // the rank's thread sleeps for ever
    {"stop", FaultKind::kStop},    // SIGSTOP of the process, once: SIGCONT lets it go on
    {"slow", FaultKind::kSlow},    // a pause at every pass, kSlowPause
    // One of the values that the phase has made is replaced (RankWatch::TakeValue).
    {"nan", FaultKind::kNaN},
    {"inf", FaultKind::kInfinity},
    {"-inf", FaultKind::kNegativeInfinity},
};

// The value that replaces another; none for the other kinds.
inline std::optional<float> ReplacementOf(FaultKind kind) {
  constexpr float kInfinite = std::numeric_limits<float>::infinity();
  if (kind == FaultKind::kNaN) return std::numeric_limits<float>::quiet_NaN();
  if (kind == FaultKind::kInfinity) return kInfinite;
  if (kind == FaultKind::kNegativeInfinity) return -kInfinite;
  return std::nullopt;
}

inline constexpr int kFaultExitCode = 70;  // none of a program's own
inline constexpr absl::Duration kSlowPause = absl::Milliseconds(100);

struct Fault {
  std::vector<int> ranks;    // of the world; empty: no fault
  int64_t step = -1;         // it comes in this step or a later one; -1: also outside of steps
  std::string phase;         // name of a Site
  int64_t micro_batch = -1;  // of a pipeline: it comes with this one alone; -1: with any
  FaultKind kind = FaultKind::kThrow;

  bool ComesTo(int rank) const;  // at some time
  bool ComesAt(const Site& site) const {
    return site.step >= step && phase == site.name &&
           (micro_batch < 0 || micro_batch == site.micro_batch);
  }
};

// Does what `kind` says to rank `rank` of the world, at `site`, after a warning that names the
// place; kSlow gives none. Only kStop, kSlow and kinds with a replacement return. kThrow:
// std::runtime_error.
void Inject(FaultKind kind, int rank, const Site& site);

}  // namespace moe

#endif  // MOE_COMM_WATCH_FAULT_H_
