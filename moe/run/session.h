// Owns what one rank needs to run a model, and lends it as a Context.
#ifndef MOE_MOE_RUN_SESSION_H_
#define MOE_MOE_RUN_SESSION_H_

#include <memory>
#include <optional>

#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "comm/mesh/mesh.h"
#include "kernels/base/caught.h"
#include "kernels/base/choice.h"
#include "kernels/base/parallel.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "moe/run/context.h"
#include "moe/run/finite.h"
#include "moe/run/stash.h"

namespace moe {

// Words of SessionOptions::device.
inline constexpr Choice<DeviceKind> kDeviceWords[] = {{"cpu", DeviceKind::kCpu},
                                                      {"cuda", DeviceKind::kCuda}};

struct SessionOptions {
  // Kind of device on which layers compute. kCuda: the device of `cuda_stream` or, without one,
  // that of DeviceOfRank.
  DeviceKind device = DeviceKind::kCpu;
  // A cudaStream_t owned by the program: the compute stream, in order with the program's own work
  // on it. It must outlive the session. nullptr: the session makes one.
  void* cuda_stream = nullptr;
  // Degrees of parallelism.
  MeshShape mesh = {};
  int threads = 1;  // CPU threads of this rank
  Numerics numerics = Numerics::kLayoutInvariant;
  // Leaves of products that are trees (GemmTree): 1, 2, 4, 8 or 16.
  int tensor_leaves = 1;
  // Order in which products of bfloat16 add their terms on a CPU; left out: that of
  // AgreedBFloat16Order. Left out on a CUDA device.
  std::optional<BFloat16Order> bfloat16_order = {};
  GroupedGemmKernel grouped_gemm = GroupedGemmKernel::kAuto;  // for products on a CUDA device
  // Gives the exchange a stream of its own: for an overlap degree above 1, and for passes that take
  // turns (moe/run/turns.h).
  bool overlap_exchange = false;
  // Number of events that the time line has memory for; 0 = no time line.
  int64_t trace_capacity = 0;
};

// Whether `ranks` ranks can have the mesh of `options`, with its leaves and on its device; names
// values that fit. kInvalidArgument; kUnimplemented for axes that are not there yet.
absl::Status CheckMesh(const SessionOptions& options, int ranks);

// kFailedPrecondition unless every rank of `world` names targets with the same bits, which
// layout-invariant numerics need: of a GPU its architecture ("sm_90"), of a CPU one of
// gemm::SimdTargets(). AVX2, AVX-512 and AMX have the same bits, whatever a rank lacks of them.
// At most 8 letters are compared. Collective, blocks the host.
absl::Status CheckOneTarget(absl::string_view target, Communicator& world, Stream& stream);

// The order of bfloat16 products on all ranks of `world`: `given`, where the program chose one;
// otherwise kTile if that is the fastest of every rank, and kDot if it is not. `fastest`: of this
// rank's CPU. Collective, blocks the host. kInvalidArgument, on every rank, unless all were given
// the same.
absl::StatusOr<BFloat16Order> AgreedBFloat16Order(std::optional<BFloat16Order> given,
                                                  BFloat16Order fastest, Communicator& world,
                                                  Stream& stream);

// The device that this rank of `world` computes on: its communicator's, otherwise CUDA devices are
// assigned in turn. kUnimplemented, with the remedy, if there are none.
absl::StatusOr<Device> DeviceOfRank(DeviceKind kind, const Communicator& world);

// One per rank, used by one thread at a time, which may change. Everything built from its context
// must be destroyed before it.
class Session {
 public:
  // Collective over `world`, blocks the host. Errors: those of Mesh::Create, of DeviceOfRank or
  // DeviceOfCudaStream, of AgreedBFloat16Order, and of MakeCublas; in layout-invariant numerics
  // those of CheckOneTarget; kInvalidArgument for an order of bfloat16 on a CUDA device, and for
  // more tensor ranks than leaves, or than 8.
  static absl::StatusOr<std::unique_ptr<Session>> Create(const SessionOptions& options,
                                                         std::unique_ptr<Communicator> world);

  const Context& context() const { return context_; }
  // Stashes for passes on the context.
  StashPool& stashes() { return *stashes_; }
  // Peak bytes of workspaces and stashes on the compute stream's device.
  int64_t peak_bytes() const;
  // For a rank that gives up: aborts its groups, so that neither peers nor its own streams wait for
  // one another, and waits until the streams are empty.
  void End(const absl::Status& reason);
  // Returns what run() returns, a StatusOr. A failure, including an exception, ends the rank (End),
  // so that memory of the caller's that its streams use may be freed.
  template <typename Run>
  auto OrEnd(const Run& run) -> decltype(run()) {
    auto result = Caught(run);
    if (!result.ok()) End(result.status());
    return result;
  }
  // Stream on which gradient buckets are summed: a queue, so that it overlaps backward.
  Stream& gradient_stream() { return *gradients_; }
  // Stream on which weights in parts are gathered: a queue, so that it overlaps both passes, with
  // communicators of its own (MeshLane::kWeights). The first call makes both; it is collective.
  absl::StatusOr<Stream*> WeightStream();
  // The time line, initially switched off: lanes "compute", "exchange" (with overlap_exchange),
  // "gradients" and, with WeightStream, "weights". nullptr without trace_capacity.
  TraceRecorder* trace() { return trace_.get(); }

 private:
  Session(int threads, MemoryResource& memory)
      : pool_(threads), workspace_(memory), exchange_workspace_(memory) {}

  absl::Status MakeStreams(const SessionOptions& options, Device device);
  void RecordTrace(int64_t capacity);

  ThreadPool pool_;
  std::unique_ptr<TraceRecorder> trace_;
  PhaseClock clock_;
  FirstNonFinite non_finite_;
  Workspace workspace_, exchange_workspace_, host_workspace_;  // the last two for CUDA devices
  std::unique_ptr<Mesh> mesh_;
  Context context_;
  std::shared_ptr<StashPool> stashes_;
  std::unique_ptr<Cublas> cublas_;  // handle for compute_, if the products need it
  SpareMultiprocessors spare_;      // of the products, for collectives beside them
  // Last: they stop first. host_ for CUDA devices, exchange_ where it overlaps, weights_ where it
  // was asked for.
  std::unique_ptr<Stream> host_, compute_, exchange_, gradients_, weights_;
};

}  // namespace moe

#endif  // MOE_MOE_RUN_SESSION_H_
