// Where a rank is, in memory that other processes can read, also after its own has ended.
#ifndef MOE_COMM_WATCH_LAST_PLACES_H_
#define MOE_COMM_WATCH_LAST_PLACES_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "comm/descriptor.h"
#include "comm/site.h"

namespace moe {

// Texts, since a pointer means nothing in another process; at most 23 bytes of each.
struct Place {
  std::string operation;  // "AllToAllV"; empty outside communication
  std::string site;       // "dispatch"
  int32_t layer = -1;
  int64_t step = -1;
  int64_t at_ns = 0;  // MonotonicNs of the arrival: one clock for all processes of a host
};

// "AllToAllV (dispatch, layer 0, step 2)", "experts (layer 0, step 2)".
std::string TextOf(const Place& place);

// The last place outside communication and the last collective that a rank has come to. Any thread
// may call any function at any time.
class LastPlaces {
 public:
  // In a file of memory; where the system gives none, in memory of this process alone.
  LastPlaces();
  // Those of another process, which it may go on to write. nullptr: `file` holds none.
  static std::unique_ptr<LastPlaces> Open(const Descriptor& file);
  ~LastPlaces();
  LastPlaces(const LastPlaces&) = delete;
  LastPlaces& operator=(const LastPlaces&) = delete;

  // The file for Open; not open where there is none, and for those of another process.
  const Descriptor& file() const { return file_; }

  // The rank comes to `site`, outside communication or in `operation`. Takes some tens of
  // nanoseconds and no lock: of two threads that come at one moment only one may be seen.
  void Mark(const Site& site);
  void Call(const char* operation, const Site& site);

  // nullopt: none yet, or it was being written just now.
  std::optional<Place> Outside() const;
  std::optional<Place> Latest() const;  // the later one of both

 private:
  struct Memory;

  explicit LastPlaces(Memory* mapped);

  Descriptor file_;
  bool mapped_ = true;  // memory_ is a map, else of operator new
  Memory* memory_ = nullptr;
};

}  // namespace moe

#endif  // MOE_COMM_WATCH_LAST_PLACES_H_
