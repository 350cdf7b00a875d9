// The last collectives of a rank, kept in memory for the report of a failure.
#ifndef MOE_COMM_WATCH_FLIGHT_RECORDER_H_
#define MOE_COMM_WATCH_FLIGHT_RECORDER_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "comm/site.h"
#include "kernels/base/choice.h"
#include "kernels/base/dtype.h"

namespace moe {

enum class FlightState : uint8_t { kEntered, kStarted, kCompleted, kFailed };
inline constexpr Choice<FlightState> kFlightStateWords[] = {
    {"entered", FlightState::kEntered},      // called, and in the queue of a stream
    {"started", FlightState::kStarted},      // the stream has come to it
    {"completed", FlightState::kCompleted},  // the stream has passed it
    {"failed", FlightState::kFailed}};

// One call, as this rank sees it.
struct FlightCall {
  const char* operation = "";  // a string literal, "AllReduce"
  Site site = {};
  int64_t bytes_in = 0, bytes_out = 0;  // of the memory that is sent, and received into
  DType type = DType::kUInt8;
  // Of the elements to and from each rank. 0: no such counts.
  uint64_t counts_hash = 0;
};

// A group of ranks.
struct FlightGroup {
  std::string name;          // the same on all its ranks
  std::vector<int> members;  // ranks of the world, in the group's order
};

// Any thread may call any function at any time. Recording takes no lock and no memory.
class FlightRecorder {
 public:
  static constexpr size_t kCapacity = 2048;

  // Adds a group; returns its number. Takes a lock and memory.
  int AddGroup(FlightGroup group);

  // Records a call of `group`, over the oldest one. `sequence` counts the collectives of a group,
  // from 0: the same number is the same collective on all its ranks. Returns a ticket for Set.
  uint64_t Enter(int group, int64_t sequence, const FlightCall& call);
  // The state of a call, with the time; no effect once it has been overwritten.
  void Set(uint64_t ticket, FlightState state);

  // JSON, an object a line, each ended by a newline: groups, then calls, oldest first. Times are
  // of MonotonicNs. Keys that do not apply are left out.
  //   {"group":"world","members":[0,1]}
  //   {"group":"world","sequence":7,"operation":"AllReduce","site":"all-reduce","layer":0,"step":5,
  //    "bytes_in":64,"bytes_out":64,"type":"f32","counts_hash":"0123456789abcdef",
  //    "state":"completed","entered_ns":1,"started_ns":2,"ended_ns":3}
  std::string Lines() const;
  uint64_t recorded() const { return next_.load(std::memory_order_relaxed) - 1; }

 private:
  // Fields are atomics, since a dump reads while the rank writes. A reader takes an entry whose
  // ticket is the same before and after: the ticket is 0 while the fields are written.
  struct Entry {
    std::atomic<uint64_t> ticket{0};
    std::atomic<const char*> operation{""}, site{""};
    std::atomic<int32_t> group{0}, layer{-1};
    std::atomic<int64_t> sequence{0}, step{-1}, bytes_in{0}, bytes_out{0};
    std::atomic<DType> type{DType::kUInt8};
    std::atomic<uint64_t> counts_hash{0};
    std::atomic<FlightState> state{FlightState::kEntered};
    std::atomic<int64_t> entered_ns{0}, started_ns{0}, ended_ns{0};
  };

  std::string LineOf(const Entry& entry) const;

  std::atomic<uint64_t> next_{1};
  // Not an array in place: GCC 12 unrolls its constructor, which takes it 40 s.
  std::vector<Entry> entries_ = std::vector<Entry>(kCapacity);
  mutable std::mutex mu_;
  std::vector<FlightGroup> groups_;  // guarded by mu_
};

}  // namespace moe

#endif  // MOE_COMM_WATCH_FLIGHT_RECORDER_H_
