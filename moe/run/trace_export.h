// Writes the time lines of all ranks as one trace that Perfetto and chrome://tracing open.
#ifndef MOE_MOE_RUN_TRACE_EXPORT_H_
#define MOE_MOE_RUN_TRACE_EXPORT_H_

#include <cstdint>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "kernels/base/trace.h"

namespace moe {

// Where the text goes, on rank 0.
class TraceSink {
 public:
  virtual ~TraceSink() = default;
  virtual absl::Status Append(absl::string_view text) = 0;
  // Once, after the last Append.
  virtual absl::Status Commit() = 0;
};

// kInvalidArgument, on every rank, if some trace and some do not: exporting is collective.
// Collective over `world`, blocks the host.
absl::Status CheckTraceOnAll(bool traced, Communicator& world);

// The events of `recorder` on every rank, as JSON in the trace event format: rank r is the process
// 100 (r + 1), its lane l the thread 100 (r + 1) + l, times in microseconds from the first event of
// any rank, by rank 0's clock (comm/clock_offset.h). docs/trace.md lists the fields. A rank's text
// goes to rank 0 in one piece and from there to the sink: rank 0 holds one rank's text at a time.
//
// Returns how many events did not fit the recorders, over all ranks. Collective, blocks the host;
// call with the streams idle. `sink` is used on rank 0 alone. Errors: those of the sink (on rank 0;
// the others then wait for it, so abort) and of the communicator.
absl::StatusOr<int64_t> ExportTrace(const TraceRecorder& recorder, TraceSink* sink,
                                    Communicator& world, Stream& stream, const Site& site = {});

}  // namespace moe

#endif  // MOE_MOE_RUN_TRACE_EXPORT_H_
