// Rows that travel between neighbouring stages of a pipeline.
#ifndef MOE_MOE_PIPELINE_LINKS_H_
#define MOE_MOE_PIPELINE_LINKS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/time/time.h>
#include <absl/types/span.h>

#include "comm/communicator.h"
#include "kernels/base/stream.h"
#include "moe/run/context.h"
#include "moe/run/stash.h"

namespace moe {

// Activations go to the next stage, from the last one to the first; gradients the other way round.
enum class RowsWay : uint8_t { kActivations, kGradients };
inline constexpr int kRowsWays = 2;

// Four queues of a rank, to and from either neighbour: a stage waits for the rows that it needs and
// for nothing else, whatever its neighbours do first. Each message is one SendRecv; those of one
// way between two stages arrive in the order in which they were sent.
class PipelineLinks {
 public:
  // Collective over the world of `context`, whose pipeline has several stages; blocks the host.
  // kUnimplemented on CUDA devices unless the communicators move rows between them (NCCL).
  static absl::StatusOr<std::unique_ptr<PipelineLinks>> Create(const Context& context);
  // Aborts the mesh if rows still travel, and waits for them.
  ~PipelineLinks();

  // Enqueued: the rows of the stage before on this way arrive in `rows`, memory of the compute
  // stream's device with which that stream's work is over. The event: they are here.
  absl::StatusOr<Event> Receive(RowsWay way, absl::Span<std::byte> rows, const Site& site);
  // Enqueued after the compute stream's work so far; `owner`, memory of `rows`, is given back once
  // they have left. The event: they have.
  absl::StatusOr<Event> Send(RowsWay way, absl::Span<const std::byte> rows, StashHandle owner,
                             const Site& site);
  // Makes the compute stream wait for all rows that were sent.
  absl::Status Join();

  absl::Duration timeout() const { return groups_.front()->timeout(); }
  int64_t bytes_sent() const { return bytes_sent_; }  // by this rank so far

 private:
  // One end of an edge between two stages.
  struct End {
    Communicator* group = nullptr;
    int peer = 0;
    std::unique_ptr<Stream> stream;
  };
  explicit PipelineLinks(const Context& context) : context_(context) {}
  absl::StatusOr<Event> Move(std::vector<End>& ends, RowsWay way, SendRecvOp op, StashHandle owner,
                             const Site& site);

  const Context context_;
  bool in_flight_ = false;  // whether something was enqueued that Join has not waited for
  int64_t bytes_sent_ = 0;
  std::vector<std::unique_ptr<Communicator>> groups_;
  std::vector<End> sends_, receives_;  // by way; last: their streams stop first
};

}  // namespace moe

#endif  // MOE_MOE_PIPELINE_LINKS_H_
