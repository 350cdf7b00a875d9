// Analyse: collectives by group and sequence.
#include <algorithm>
#include <utility>

#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>

#include "moe/cli/debug/flight.h"

namespace moe::flight {
namespace {

// A collective, as each rank with a dump has it.
struct Meeting {
  std::map<int, const Call*> calls;  // by rank
  const Call* First() const {
    const auto earlier = [](const auto& a, const auto& b) {
      return a.second->entered_ns < b.second->entered_ns;
    };
    return std::min_element(calls.begin(), calls.end(), earlier)->second;
  }
};

struct Group {
  std::vector<int> members;
  std::map<int64_t, Meeting> meetings;   // by sequence
  std::map<int64_t, Meeting> transfers;  // likewise, of SendRecv, whose numbers are a rank's own
};

using Groups = std::map<std::string, Group>;

// Collectives from the first that every recorder which has the group still holds.
Groups GroupsOf(const std::vector<Dump>& dumps) {
  Groups groups;
  for (const Dump& dump : dumps) {
    for (const auto& [name, members] : dump.groups) groups[name].members = members;
    for (const Call& call : dump.calls) {
      Group& group = groups[call.group];
      auto& of_kind = call.is_transfer() ? group.transfers : group.meetings;
      of_kind[call.sequence].calls[dump.rank] = &call;
    }
  }
  for (const Dump& dump : dumps) {
    std::map<std::string, int64_t> oldest;
    for (const Call& call : dump.calls) {
      if (!call.is_transfer()) oldest.try_emplace(call.group, call.sequence);
    }
    for (const auto& [name, sequence] : oldest) {
      auto& meetings = groups[name].meetings;
      meetings.erase(meetings.begin(), meetings.lower_bound(sequence));
    }
  }
  return groups;
}

// Whether ranks of one collective may have these two calls.
bool Same(const Call& a, const Call& b) {
  if (a.operation != b.operation || a.type != b.type) return false;
  const bool one_size = a.operation == "AllReduce" || a.operation == "Broadcast" ||
                        a.operation == "AllGather" || a.operation == "ReduceScatter" ||
                        a.operation == "AllToAll";
  return !one_size || (a.bytes_in == b.bytes_in && a.bytes_out == b.bytes_out);
}

const Dump* DumpOf(const std::vector<Dump>& dumps, int rank) {
  for (const Dump& dump : dumps) {
    if (dump.rank == rank) return &dump;
  }
  return nullptr;
}

// The collective or transfer that the rank has not left; nullptr: none.
const Call* OpenCall(const Dump& dump) {
  for (auto call = dump.calls.rbegin(); call != dump.calls.rend(); ++call) {
    if (call->is_open()) return &*call;
  }
  return nullptr;
}

// "rank 1 is in Broadcast (weights, step 5)".
std::string WhereIs(int rank, const std::vector<Dump>& dumps) {
  const Dump* const dump = DumpOf(dumps, rank);
  if (dump == nullptr) return absl::StrCat("rank ", rank, " has no dump");
  const Call* const call = OpenCall(*dump);
  if (call != nullptr) return absl::StrCat("rank ", rank, " is in ", TextOf(*call));
  return absl::StrCat("rank ", rank, " was last in ", dump->at.empty() ? "no place" : dump->at);
}

// The last number in `reason` between `before` and `after`; -1: none.
int RankIn(absl::string_view reason, absl::string_view before, absl::string_view after) {
  for (size_t end = reason.size(); end > 0;) {
    const size_t found = reason.rfind(before, end - 1);
    if (found == reason.npos) break;
    const absl::string_view rest = reason.substr(found + before.size());
    const size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
    int rank = -1;
    if (absl::StartsWith(rest.substr(digits), after) &&
        absl::SimpleAtoi(rest.substr(0, digits), &rank)) {
      return rank;
    }
    end = found;
  }
  return -1;
}

// Analysis::failed. All dumps of a process have the reason of its first rank that failed.
int FailedRank(const std::vector<Dump>& dumps) {
  for (const Dump& dump : dumps) {
    const std::string& reason = dump.reason;
    // The rank that waited is not the one that failed.
    if (reason.empty() || reason == "end" || reason == "SIGUSR2" ||
        absl::StrContains(reason, ": waited ")) {
      continue;
    }
    int rank = RankIn(reason, "was stopped by rank ", ":");
    if (rank < 0) rank = RankIn(reason, "rank ", " on host ");
    if (rank >= 0 && rank < dump.ranks) return rank;
    const auto has_it = [&](const Dump& other) {
      return other.reason == reason;
    };
    if (std::count_if(dumps.begin(), dumps.end(), has_it) == 1) return dump.rank;
  }
  return -1;
}

Difference DifferenceOf(const Group& group, const Meeting& meeting, const std::vector<Dump>& dumps,
                        int failed) {
  using Kind = Difference::Kind;
  const Call& first = *meeting.First();
  std::vector<int> missing, other, open;
  for (const int rank : group.members) {
    const auto call = meeting.calls.find(rank);
    if (call == meeting.calls.end()) {
      missing.push_back(rank);
    } else if (!Same(*call->second, first)) {
      other.push_back(rank);
    } else if (call->second->state == "started" || call->second->state == "failed") {
      open.push_back(rank);
    }
  }
  // A rank that has completed it knows that all have entered: a missing entry was made after the
  // dump, or the rank has none.
  const bool ended = std::all_of(meeting.calls.begin(), meeting.calls.end(), [](const auto& each) {
    return each.second->state == "completed";
  });
  Difference found;
  if (!other.empty()) {
    found.kind = Kind::kOtherCall;
    found.ranks = std::move(other);
    for (const int rank : found.ranks) {
      found.where.push_back(absl::StrCat("rank ", rank, " has ", TextOf(*meeting.calls.at(rank))));
    }
  } else if (!missing.empty() && !ended) {
    found.kind = Kind::kMissing;
    std::vector<int> idle;
    for (const int rank : missing) {
      const Dump* const dump = DumpOf(dumps, rank);
      if (dump == nullptr || OpenCall(*dump) == nullptr) idle.push_back(rank);
    }
    found.ranks = idle.empty() ? std::move(missing) : std::move(idle);
  } else if (!open.empty()) {
    found.kind = Kind::kOpen;
    found.ranks = failed < 0 ? std::move(open) : std::vector<int>{failed};
  } else {
    return found;
  }
  found.call = first;
  found.members = group.members;
  if (found.kind != Kind::kOtherCall) {
    for (const int rank : found.ranks) found.where.push_back(WhereIs(rank, dumps));
  }
  return found;
}

bool IsBefore(const Difference& a, const Difference& b) {
  const bool a_is_open = a.kind == Difference::Kind::kOpen;
  if (a_is_open != (b.kind == Difference::Kind::kOpen)) return !a_is_open;
  return a.call.entered_ns < b.call.entered_ns;
}

Difference FirstDifference(const Groups& groups, const std::vector<Dump>& dumps, int failed) {
  using Kind = Difference::Kind;
  Difference first;
  for (const auto& [name, group] : groups) {
    if (group.members.size() < 2) continue;
    for (const auto& [sequence, meeting] : group.meetings) {
      Difference found = DifferenceOf(group, meeting, dumps, failed);
      if (found.kind == Kind::kNone) continue;
      const bool is_open = found.kind == Kind::kOpen;
      if (first.kind == Kind::kNone || IsBefore(found, first)) first = std::move(found);
      if (!is_open) break;  // what follows in this group was entered later
    }
  }
  return first;
}

// Whether all members have it, in one place: transfers of other places may share a number.
bool IsOfAll(const Meeting& meeting, const Group& group) {
  const Call& first = *meeting.calls.begin()->second;
  return meeting.calls.size() == group.members.size() && meeting.calls.size() > 1 &&
         std::all_of(meeting.calls.begin(), meeting.calls.end(), [&](const auto& each) {
           const Call& call = *each.second;
           return call.site == first.site && call.layer == first.layer && call.step == first.step;
         });
}

// Collectives of which all members have entries, in the order in which their first ranks came.
std::vector<const Meeting*> MeetingsOfAll(const Groups& groups) {
  std::vector<const Meeting*> found;
  for (const auto& [name, group] : groups) {
    for (const auto* const of_kind : {&group.meetings, &group.transfers}) {
      for (const auto& [sequence, meeting] : *of_kind) {
        if (IsOfAll(meeting, group)) found.push_back(&meeting);
      }
    }
  }
  std::stable_sort(found.begin(), found.end(), [](const Meeting* one, const Meeting* other) {
    return one->First()->entered_ns < other->First()->entered_ns;
  });
  return found;
}

// Adds to the rank that came last. late_ns: of each rank, by how much it came last to a call in
// which nobody waited for it: calls of a device's stream are entered one after another, so that
// whoever is late to one is late to those that follow, and what it was late before is not added.
void AddLast(const Meeting& meeting, std::map<int, int64_t>& late_ns,
             std::map<int, Straggler>& of_rank) {
  int last = -1;
  int64_t latest = 0, before = 0, left = 0;
  for (const auto& [rank, call] : meeting.calls) {
    const int64_t came = call->started_ns != 0 ? call->started_ns : call->entered_ns;
    left = std::max(left, call->ended_ns);
    before = std::max(before, std::min(came, latest));
    if (came <= latest) continue;
    before = latest;
    latest = came;
    last = rank;
  }
  const int64_t late = latest - before, known = late_ns[last];
  for (const auto& [rank, call] : meeting.calls) late_ns[rank] = 0;
  if (left < latest) late_ns[last] = late;
  Straggler& straggler = of_rank[last];
  straggler.rank = last;
  ++straggler.last;
  straggler.seconds += static_cast<double>(std::max<int64_t>(0, late - known)) * 1e-9;
}

Straggler StragglerOf(const Groups& groups) {
  std::map<int, Straggler> of_rank;
  std::map<int, int64_t> late_ns;
  const std::vector<const Meeting*> meetings = MeetingsOfAll(groups);
  for (const Meeting* const meeting : meetings) AddLast(*meeting, late_ns, of_rank);
  Straggler worst;
  for (const auto& [rank, straggler] : of_rank) {
    if (straggler.seconds > worst.seconds) worst = straggler;
  }
  worst.calls = std::ssize(meetings);
  return worst;
}

}  // namespace

std::string TextOf(const Call& call) {
  std::string text = call.is_transfer()
                         ? absl::StrCat(call.operation, " of ", call.group)
                         : absl::StrCat(call.operation, " ", call.sequence, " of ", call.group);
  std::string where = call.site;
  const auto add = [&where](absl::string_view name, int64_t number) {
    if (number >= 0) absl::StrAppend(&where, where.empty() ? "" : ", ", name, " ", number);
  };
  add("layer", call.layer);
  add("step", call.step);
  return where.empty() ? text : absl::StrCat(text, " (", where, ")");
}

Analysis Analyse(const std::vector<Dump>& dumps) {
  Analysis analysis;
  for (const Dump& dump : dumps) {
    analysis.ranks.push_back(dump.rank);
    auto& reasons = analysis.reasons;
    if (dump.reason.empty() || std::count(reasons.begin(), reasons.end(), dump.reason) > 0)
      continue;
    reasons.push_back(dump.reason);
  }
  for (int rank = 0; !dumps.empty() && rank < dumps.front().ranks; ++rank) {
    if (DumpOf(dumps, rank) == nullptr) analysis.without_dump.push_back(rank);
  }
  const Groups groups = GroupsOf(dumps);
  analysis.failed = FailedRank(dumps);
  if (analysis.failed >= 0) analysis.failed_where = WhereIs(analysis.failed, dumps);
  analysis.difference = FirstDifference(groups, dumps, analysis.failed);
  analysis.straggler = StragglerOf(groups);
  return analysis;
}

}  // namespace moe::flight
