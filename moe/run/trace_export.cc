#include "moe/run/trace_export.h"

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include <nlohmann/json.hpp>

#include "comm/clock_offset.h"
#include "comm/extremes.h"
#include "comm/hosts.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

using Json = nlohmann::ordered_json;

// What rank 0 reports about every rank at the end.
struct RankFacts {
  int64_t events = 0;
  int64_t left_out = 0;
  int64_t offset_ns = 0;
  int64_t error_ns = 0;
};

// Perfetto identifies a thread by its tid alone, treats the one whose tid is the pid as the main
// thread, and reserves 0 for the idle process: so every lane has a number of its own, and none is
// 0.
int64_t PidOf(int rank) {
  constexpr int64_t kMostLanes = 100;  // a round number: rank 2 is 300
  return kMostLanes * (rank + 1);
}

// Writes the names that viewers show on the left, and their order.
void AppendMetadata(const TraceRecorder& recorder, int rank, std::string& text) {
  const int64_t pid = PidOf(rank);
  const auto add = [&](const char* name, int lane, const Json& args) {
    const Json event = {
        {"name", name}, {"ph", "M"}, {"pid", pid}, {"tid", pid + lane}, {"args", args}};
    absl::StrAppend(&text, event.dump(-1, ' ', false, Json::error_handler_t::replace), ",\n");
  };
  add("process_name", 0, {{"name", absl::StrCat("rank ", rank, " (", HostName(), ")")}});
  add("process_sort_index", 0, {{"sort_index", rank}});
  for (int lane = 0; lane < recorder.lanes(); ++lane) {
    add("thread_name", lane, {{"name", recorder.lane_name(lane)}});
    add("thread_sort_index", lane, {{"sort_index", lane}});
  }
}

// Names are literals of this program: they need no escapes.
void AppendEvent(const TraceEvent& event, int rank, int64_t shift_ns, std::string& text) {
  const int64_t pid = PidOf(rank);
  const auto microseconds = [](int64_t ns) {
    return absl::StrFormat("%d.%03d", ns / 1000, ns % 1000);
  };
  absl::StrAppend(&text, "{\"name\":\"", event.name, "\",\"cat\":\"", event.category,
                  "\",\"ph\":\"X\",\"pid\":", pid, ",\"tid\":", pid + event.lane,
                  ",\"ts\":", microseconds(event.begin_ns + shift_ns),
                  ",\"dur\":", microseconds(event.end_ns - event.begin_ns), ",\"args\":{");
  const char* separator = "";
  const auto add = [&](const char* key, int64_t value) {
    if (value < 0) return;
    absl::StrAppend(&text, separator, "\"", key, "\":", value);
    separator = ",";
  };
  add("step", event.step);
  add("call", event.call);
  add("layer", event.layer);
  add("chunk", event.chunk);
  add("bucket", event.bucket);
  add("bytes", event.bytes);
  add("bytes_self", event.bytes_self);
  text += "}},\n";
}

std::string TextOf(const TraceRecorder& recorder, int rank, int64_t shift_ns) {
  std::string text;
  AppendMetadata(recorder, rank, text);
  for (const TraceEvent& event : recorder.events()) AppendEvent(event, rank, shift_ns, text);
  return text;
}

// Nanoseconds to add to rank 0's clock so that the first event of all ranks is at 0.
absl::StatusOr<int64_t> Origin(const TraceRecorder& recorder, int64_t offset_ns,
                               Communicator& world, Stream& stream, const Site& site) {
  int64_t latest = std::numeric_limits<int64_t>::min();  // largest negated time
  for (const TraceEvent& event : recorder.events()) {
    latest = std::max(latest, -(event.begin_ns + offset_ns));
  }
  MOE_RETURN_IF_ERROR(world.AllReduce<int64_t>({&latest, 1}, ReduceOp::kMax, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  // No rank has an event: nothing to shift.
  return latest == std::numeric_limits<int64_t>::min() ? 0 : latest;
}

// Text of rank `from`, received on rank 0.
absl::StatusOr<std::string> Fetch(int from, std::string mine, Communicator& world, Stream& stream,
                                  const Site& site) {
  if (from == 0) return mine;
  const bool sends = world.rank() == from;
  auto size = static_cast<int64_t>(mine.size());
  const auto transfer = [&](void* data, int64_t bytes) -> absl::Status {
    const SendRecvOp op = sends ? SendRecvOp{.peer = 0, .send = data, .bytes = bytes}
                                : SendRecvOp{.peer = from, .recv = data, .bytes = bytes};
    MOE_RETURN_IF_ERROR(world.SendRecv({&op, 1}, stream, site));
    return stream.Synchronize();
  };
  MOE_RETURN_IF_ERROR(transfer(&size, sizeof(size)));
  if (!sends) mine.resize(size);
  MOE_RETURN_IF_ERROR(transfer(mine.data(), size));
  return mine;
}

// End of the document. The trace event format allows no comma after the last event: that is this
// one, which repeats the name of the first process.
std::string Tail(const std::vector<RankFacts>& ranks) {
  Json facts = Json::array();
  int64_t left_out = 0, error_ns = 0;
  for (const RankFacts& rank : ranks) {
    left_out += rank.left_out;
    error_ns = std::max(error_ns, rank.error_ns);
    facts.push_back({{"events", rank.events},
                     {"left_out", rank.left_out},
                     {"clock_offset_us", static_cast<double>(rank.offset_ns) * 1e-3},
                     {"clock_error_us", static_cast<double>(rank.error_ns) * 1e-3}});
  }
  const Json other = {{"schema", "moe.trace/1"},
                      {"clock", error_ns == 0 ? "CLOCK_MONOTONIC of one host"
                                              : "rank 0's CLOCK_MONOTONIC, estimated by pings"},
                      {"left_out", left_out},
                      {"ranks", facts}};
  return absl::StrCat("{\"name\":\"process_labels\",\"ph\":\"M\",\"pid\":", PidOf(0),
                      ",\"tid\":", PidOf(0),
                      ",\"args\":{\"labels\":\"moe\"}}\n],\n"
                      "\"displayTimeUnit\":\"ms\",\n\"otherData\":",
                      other.dump(), "}\n");
}

}  // namespace

absl::Status CheckTraceOnAll(bool traced, Communicator& world) {
  const auto stream = MakeInlineStream();
  MOE_ASSIGN_OR_RETURN(const auto given, ExtremesOverRanks({traced ? 1 : 0}, world, *stream));
  if (given[0].same()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--trace is given on some ranks alone, expected it on all: as a flag, or MOE_TRACE in the "
      "environment of every host");
}

absl::StatusOr<int64_t> ExportTrace(const TraceRecorder& recorder, TraceSink* sink,
                                    Communicator& world, Stream& stream, const Site& site) {
  const int rank = world.rank();
  MOE_ASSIGN_OR_RETURN(const ClockOffset clock,
                       EstimateClockOffset(HostId(), MonotonicNs, world, stream, site));
  MOE_ASSIGN_OR_RETURN(const int64_t origin,
                       Origin(recorder, clock.offset_ns, world, stream, site));
  const RankFacts mine = {.events = static_cast<int64_t>(recorder.events().size()),
                          .left_out = recorder.left_out(),
                          .offset_ns = clock.offset_ns,
                          .error_ns = clock.error_ns};
  static_assert(sizeof(RankFacts) == 4 * sizeof(int64_t));
  std::vector<RankFacts> facts(world.size());
  MOE_RETURN_IF_ERROR(world.AllGather<int64_t>(
      {&mine.events, 4}, {&facts.front().events, 4 * facts.size()}, stream, site));
  MOE_RETURN_IF_ERROR(stream.Synchronize());

  if (rank == 0) MOE_RETURN_IF_ERROR(sink->Append("{\"traceEvents\":[\n"));
  for (int from = 0; from < world.size(); ++from) {
    if (rank != 0 && rank != from) continue;
    std::string text;
    if (rank == from) text = TextOf(recorder, rank, clock.offset_ns + origin);
    MOE_ASSIGN_OR_RETURN(text, Fetch(from, std::move(text), world, stream, site));
    if (rank == 0) MOE_RETURN_IF_ERROR(sink->Append(text));
  }
  if (rank == 0) {
    MOE_RETURN_IF_ERROR(sink->Append(Tail(facts)));
    MOE_RETURN_IF_ERROR(sink->Commit());
  }
  int64_t left_out = 0;
  for (const RankFacts& each : facts) left_out += each.left_out;
  return left_out;
}

}  // namespace moe
