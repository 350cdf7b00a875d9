// What the flight recorders of a run's ranks have in common, and where they differ.
#ifndef MOE_MOE_CLI_DEBUG_FLIGHT_H_
#define MOE_MOE_CLI_DEBUG_FLIGHT_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe::flight {

struct Call {
  std::string group;
  int64_t sequence = 0;
  std::string operation, site, type, state, counts_hash;
  int64_t layer = -1, step = -1, bytes_in = 0, bytes_out = 0;
  // Of the clock that all ranks of a host share, moved to the time of day; 0: has not come.
  int64_t entered_ns = 0, started_ns = 0, ended_ns = 0;

  bool is_transfer() const { return operation == "SendRecv"; }
  bool is_open() const { return state == "entered" || state == "started"; }
};

// One file, flight.rank<R>.jsonl.
struct Dump {
  int rank = 0, ranks = 0;
  int64_t began_ns = 0, written_ns = 0;  // times of day: of the run in its process, of the dump
  std::string host, reason;
  std::string at;  // the last place outside communication, "data, step 5"; empty: none
  std::map<std::string, std::vector<int>> groups;  // members, by name
  std::vector<Call> calls;                         // oldest first
};

// Reads the text of `file`. kDataLoss "<file>: ...": malformed, or of another format.
absl::StatusOr<Dump> ParseDump(const std::string& file, absl::string_view text);

// The dumps of the newest run in `folder`, by rank: those with as many ranks as the newest dump,
// and not written before its process began. kNotFound: the folder or dumps in it are not there.
// kDataLoss: ParseDump's, two dumps of one rank.
absl::StatusOr<std::vector<Dump>> ReadDumps(const std::string& folder);

// The first collective on which ranks differ.
struct Difference {
  enum class Kind : uint8_t { kNone, kOtherCall, kMissing, kOpen };
  Kind kind = Kind::kNone;
  Call call;                 // as the first of the ranks that entered it has it
  std::vector<int> members;  // of its group
  // kOtherCall: the ranks whose call is another one. kMissing: those that have not entered it.
  // kOpen, where all have entered: the rank that failed, if that is known, else those in which it
  // has not ended.
  std::vector<int> ranks;
  // One for each of `ranks`: "rank 1 is in Broadcast (weights, step 5)", "rank 1 was last in data,
  // step 5", "rank 1 has no dump".
  std::vector<std::string> where;
};

// The rank that the others wait for.
struct Straggler {
  int rank = -1;       // -1: none
  int64_t last = 0;    // collectives that it entered last, of
  int64_t calls = 0;   // those of which all members have entries
  double seconds = 0;  // by which it came after the last but one; each delay once
};

struct Analysis {
  std::vector<int> ranks, without_dump;
  std::vector<std::string> reasons;  // of the dumps, each once
  // The first rank that failed of itself: not as it waited, nor as another stopped it. -1: unknown.
  int failed = -1;
  std::string failed_where;  // as Difference::where
  Difference difference;
  Straggler straggler;
};

// Compares collectives by group and sequence: operation, type, and bytes where all ranks have the
// same. Of several that differ, the one that was entered first, kOpen after the other kinds. Groups
// of one rank do not differ. What the oldest entries of a full recorder no longer cover is left
// out. Among the missing ranks, those that wait in a collective of another group are left out where
// one remains that does not: they wait for it, too. A rank without an entry is missing where
// another has not completed the collective.
Analysis Analyse(const std::vector<Dump>& dumps);

// "AllReduce 7 of world (all-reduce, step 5)".
std::string TextOf(const Call& call);

}  // namespace moe::flight

#endif  // MOE_MOE_CLI_DEBUG_FLIGHT_H_
