// Work that a CUDA device's streams repeat, captured as graphs and launched as a whole.
#ifndef MOE_KERNELS_BASE_STREAM_GRAPHS_H_
#define MOE_KERNELS_BASE_STREAM_GRAPHS_H_

#include <cstddef>
#include <cstdint>
#include <memory>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "kernels/base/stream.h"

namespace moe {

// A pass is what a body enqueues in these streams, told by a key: every number, shape and address
// that its work depends on, but not what lies at the addresses, nor what it uploads. The first call
// of a pass runs as any other, so that memory grows and kernels are loaded. The second is captured.
// Later ones replay it: the body runs again, for what it does on the host, while the streams drop
// what it enqueues; then one launch does all of that.
//
// The graph keeps copies of uploaded arrays. A replay compares them, and takes values that have
// changed after it has waited for the launch before.
//
// Once a pass is captured its body must not wait for the streams nor enqueue tasks of the host
// (kFailedPrecondition), nor take part in events of streams beside these, and must enqueue the same
// every time (kInternal where it can be seen; other arguments of kernels cannot: the key must tell
// them). By one thread at a time.
class StreamGraphs {
 public:
  // Passes that are known at a time. Of more, the one whose last call is longest ago is forgotten,
  // with a warning, once, if none was called twice so far.
  static constexpr size_t kMostPasses = 64;

  virtual ~StreamGraphs() = default;
  StreamGraphs(const StreamGraphs&) = delete;
  StreamGraphs& operator=(const StreamGraphs&) = delete;

  // What bodies enqueue in, in place of the i-th of the streams given. Outside of Run the same.
  virtual Stream& stream(size_t i) = 0;

  // Runs the body in the manner above, after what is in all of the streams and before what follows
  // there. Returns the number of the pass, the same until it is forgotten. A body that fails is
  // forgotten.
  virtual absl::StatusOr<int64_t> Run(absl::Span<const uint64_t> key,
                                      absl::FunctionRef<absl::Status()> body) = 0;

 protected:
  StreamGraphs() = default;
};

// Streams of one CUDA device, which must outlive the graphs; the same one may be given twice.
absl::StatusOr<std::unique_ptr<StreamGraphs>> MakeStreamGraphs(absl::Span<Stream* const> streams);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_STREAM_GRAPHS_H_
