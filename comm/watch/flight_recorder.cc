#include "comm/watch/flight_recorder.h"

#include <algorithm>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/watch/shared_field.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

void AddNumber(std::string* out, absl::string_view key, int64_t value, int64_t absent) {
  if (value != absent) absl::StrAppend(out, ",\"", key, "\":", value);
}

}  // namespace

int FlightRecorder::AddGroup(FlightGroup group) {
  const std::lock_guard<std::mutex> lock(mu_);
  groups_.push_back(std::move(group));
  return static_cast<int>(groups_.size()) - 1;
}

uint64_t FlightRecorder::Enter(int group, int64_t sequence, const FlightCall& call) {
  const uint64_t ticket = next_.fetch_add(1, std::memory_order_relaxed);
  Entry& entry = entries_[ticket % kCapacity];
  Store(entry.ticket, uint64_t{0});
  Store(entry.operation, call.operation);
  Store(entry.site, call.site.name);
  Store(entry.group, int32_t{group});
  Store(entry.layer, call.site.layer);
  Store(entry.sequence, sequence);
  Store(entry.step, call.site.step);
  Store(entry.bytes_in, call.bytes_in);
  Store(entry.bytes_out, call.bytes_out);
  Store(entry.type, call.type);
  Store(entry.counts_hash, call.counts_hash);
  Store(entry.state, FlightState::kEntered);
  Store(entry.entered_ns, MonotonicNs());
  Store(entry.started_ns, int64_t{0});
  Store(entry.ended_ns, int64_t{0});
  Store(entry.ticket, ticket);
  return ticket;
}

void FlightRecorder::Set(uint64_t ticket, FlightState state) {
  Entry& entry = entries_[ticket % kCapacity];
  if (Load(entry.ticket) != ticket) return;
  Store(state == FlightState::kStarted ? entry.started_ns : entry.ended_ns, MonotonicNs());
  Store(entry.state, state);
}

std::string FlightRecorder::LineOf(const Entry& entry) const {
  const uint64_t ticket = Load(entry.ticket);
  if (ticket == 0) return "";
  std::string line;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    line =
        absl::StrCat("{\"group\":\"", groups_[static_cast<size_t>(Load(entry.group))].name, "\"");
  }
  AddNumber(&line, "sequence", Load(entry.sequence), -1);
  absl::StrAppend(&line, ",\"operation\":\"", Load(entry.operation), "\"");
  const char* const site = Load(entry.site);
  if (*site != '\0') absl::StrAppend(&line, ",\"site\":\"", site, "\"");
  AddNumber(&line, "layer", Load(entry.layer), -1);
  AddNumber(&line, "step", Load(entry.step), -1);
  AddNumber(&line, "bytes_in", Load(entry.bytes_in), -1);
  AddNumber(&line, "bytes_out", Load(entry.bytes_out), -1);
  absl::StrAppend(&line, ",\"type\":\"", NameOf(Load(entry.type)), "\"");
  const uint64_t hash = Load(entry.counts_hash);
  if (hash != 0) {
    absl::StrAppend(&line, ",\"counts_hash\":\"", absl::Hex(hash, absl::kZeroPad16), "\"");
  }
  const FlightState state = Load(entry.state);
  absl::StrAppend(&line, ",\"state\":\"", NameOf(state, kFlightStateWords), "\"");
  AddNumber(&line, "entered_ns", Load(entry.entered_ns), 0);
  AddNumber(&line, "started_ns", Load(entry.started_ns), 0);
  AddNumber(&line, "ended_ns", Load(entry.ended_ns), 0);
  if (entry.ticket.load(std::memory_order_relaxed) != ticket) return "";
  return absl::StrCat(line, "}\n");
}

std::string FlightRecorder::Lines() const {
  std::string lines;
  {
    const std::lock_guard<std::mutex> lock(mu_);
    for (const FlightGroup& group : groups_) {
      absl::StrAppend(&lines, "{\"group\":\"", group.name, "\",\"members\":[",
                      absl::StrJoin(group.members, ","), "]}\n");
    }
  }
  const uint64_t end = next_.load(std::memory_order_relaxed);
  const uint64_t begin = end > kCapacity ? end - kCapacity : 1;
  for (uint64_t ticket = begin; ticket < end; ++ticket)
    lines += LineOf(entries_[ticket % kCapacity]);
  return lines;
}

}  // namespace moe
