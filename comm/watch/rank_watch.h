// What all work of a rank passes: its places, its flight recorder, and the fault of a test.
#ifndef MOE_COMM_WATCH_RANK_WATCH_H_
#define MOE_COMM_WATCH_RANK_WATCH_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "comm/watch/fault.h"
#include "comm/watch/flight_recorder.h"
#include "comm/watch/last_places.h"

namespace moe {

// One per rank of the world; its communicators share it (Communicator::Attach). Any thread.
class RankWatch {
 public:
  RankWatch(int rank, int ranks, const Fault& fault)
      : rank_(rank),
        ranks_(ranks),
        armed_(fault.ComesTo(rank)),
        replaces_(armed_ && ReplacementOf(fault.kind).has_value()),
        fault_(fault) {}

  int rank() const { return rank_; }    // of the world
  int ranks() const { return ranks_; }  // of the world
  FlightRecorder& recorder() { return recorder_; }
  const FlightRecorder& recorder() const { return recorder_; }
  const LastPlaces& places() const { return places_; }

  // The rank comes to `site`. Without a fault for this rank: LastPlaces::Mark and one comparison.
  // Otherwise it may throw, sleep, or end the process (Inject).
  void Mark(const Site& site) {
    places_.Mark(site);
    Meet(site);
  }
  // The value that is to replace one of those that the rank has made at `site`; once. Warns.
  std::optional<float> TakeValue(const Site& site) {
    if (!replaces_ || !fault_.ComesAt(site) || met_.exchange(true)) return std::nullopt;
    Inject(fault_.kind, rank_, site);
    return ReplacementOf(fault_.kind);
  }
  // The rank calls a collective; the fault comes before the recorder has it. FlightRecorder::Enter.
  uint64_t Enter(int group, int64_t sequence, const FlightCall& call) {
    places_.Call(call.operation, call.site);
    Meet(call.site);
    return recorder_.Enter(group, sequence, call);
  }

 private:
  void Meet(const Site& site) {
    if (!armed_ || replaces_ || !fault_.ComesAt(site)) return;
    if (fault_.kind == FaultKind::kSlow || !met_.exchange(true)) Inject(fault_.kind, rank_, site);
  }

  const int rank_, ranks_;
  const bool armed_, replaces_;
  const Fault fault_;
  std::atomic<bool> met_ = false;  // whether what comes once has come
  LastPlaces places_;
  FlightRecorder recorder_;
};

}  // namespace moe

#endif  // MOE_COMM_WATCH_RANK_WATCH_H_
