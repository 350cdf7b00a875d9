// Analyse: collectives by group and sequence.
#include <algorithm>
#include <utility>

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

Difference DifferenceOf(const Group& group, const Meeting& meeting,
                        const std::vector<Dump>& dumps) {
  Difference found = {.call = *meeting.First(), .members = group.members, .ranks = {}, .where = {}};
  std::vector<int> missing, other, open;
  for (const int rank : group.members) {
    const auto call = meeting.calls.find(rank);
    if (call == meeting.calls.end()) {
      missing.push_back(rank);
    } else if (!Same(*call->second, found.call)) {
      other.push_back(rank);
    } else if (call->second->state == "started" || call->second->state == "failed") {
      open.push_back(rank);
    }
  }
  if (!other.empty()) {
    found.kind = Difference::Kind::kOtherCall;
    found.ranks = std::move(other);
    for (const int rank : found.ranks) {
      found.where.push_back(absl::StrCat("rank ", rank, " has ", TextOf(*meeting.calls.at(rank))));
    }
    return found;
  }
  // A rank that has completed it knows that all have entered: a missing entry was made after the
  // dump, or the rank has none.
  const bool ended = std::all_of(meeting.calls.begin(), meeting.calls.end(), [](const auto& each) {
    return each.second->state == "completed";
  });
  if (!missing.empty() && !ended) {
    found.kind = Difference::Kind::kMissing;
    std::vector<int> idle;
    for (const int rank : missing) {
      const Dump* const dump = DumpOf(dumps, rank);
      if (dump == nullptr || OpenCall(*dump) == nullptr) idle.push_back(rank);
    }
    found.ranks = idle.empty() ? std::move(missing) : std::move(idle);
  } else if (!open.empty()) {
    found.kind = Difference::Kind::kOpen;
    found.ranks = std::move(open);
  }
  for (const int rank : found.ranks) {
    const Dump* const dump = DumpOf(dumps, rank);
    const Call* const call = dump == nullptr ? nullptr : OpenCall(*dump);
    if (dump == nullptr) {
      found.where.push_back(absl::StrCat("rank ", rank, " has no dump"));
    } else if (call != nullptr) {
      found.where.push_back(absl::StrCat("rank ", rank, " is in ", TextOf(*call)));
    } else {
      found.where.push_back(
          absl::StrCat("rank ", rank, " was last in ", dump->at.empty() ? "no place" : dump->at));
    }
  }
  return found;
}

Difference FirstDifference(const Groups& groups, const std::vector<Dump>& dumps) {
  Difference first;
  for (const auto& [name, group] : groups) {
    for (const auto& [sequence, meeting] : group.meetings) {
      const Difference found = DifferenceOf(group, meeting, dumps);
      if (found.kind == Difference::Kind::kNone) continue;
      if (first.kind == Difference::Kind::kNone || found.call.entered_ns < first.call.entered_ns) {
        first = found;
      }
      break;  // what follows in this group was entered later
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

// Adds to the rank that came last.
void AddLast(const Meeting& meeting, std::map<int, Straggler>& of_rank) {
  int last = -1;
  int64_t latest = 0, before = 0;
  for (const auto& [rank, call] : meeting.calls) {
    const int64_t came = call->started_ns != 0 ? call->started_ns : call->entered_ns;
    before = std::max(before, std::min(came, latest));
    if (came <= latest) continue;
    before = latest;
    latest = came;
    last = rank;
  }
  Straggler& straggler = of_rank[last];
  straggler.rank = last;
  ++straggler.last;
  straggler.seconds += static_cast<double>(latest - before) * 1e-9;
}

Straggler StragglerOf(const Groups& groups) {
  std::map<int, Straggler> of_rank;
  int64_t calls = 0;
  for (const auto& [name, group] : groups) {
    for (const auto* const of_kind : {&group.meetings, &group.transfers}) {
      for (const auto& [sequence, meeting] : *of_kind) {
        if (!IsOfAll(meeting, group)) continue;
        ++calls;
        AddLast(meeting, of_rank);
      }
    }
  }
  Straggler worst;
  for (const auto& [rank, straggler] : of_rank) {
    if (straggler.seconds > worst.seconds) worst = straggler;
  }
  worst.calls = calls;
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
  analysis.difference = FirstDifference(groups, dumps);
  analysis.straggler = StragglerOf(groups);
  return analysis;
}

}  // namespace moe::flight
