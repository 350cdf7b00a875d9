// Trainable tensors: float32 masters, compute copies, gradients, canonical names.
#ifndef MOE_MOE_STATE_PARAMETER_H_
#define MOE_MOE_STATE_PARAMETER_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "comm/mesh/mesh_shape.h"
#include "kernels/base/buffer.h"
#include "kernels/base/dtype.h"
#include "kernels/base/parallel.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/tensor_view.h"
#include "kernels/exact_sum/grad_accumulator.h"
#include "moe/run/context.h"
#include "moe/state/canonical_tensor.h"

namespace moe {

enum class Initializer : uint8_t { kNormal, kOnes, kZeros };

struct ParameterSpec {
  std::string name = {};  // "layers.0.mlp.experts.3.gate_up_proj.weight"
  int64_t rows = 1;
  int64_t cols = 1;
  // The ranks that hold the same values, over which gradients are summed: kStage, or kData where
  // tensor parallelism would cut it; kExpertData.
  MeshGroup holders = MeshGroup::kStage;
  Initializer initializer = Initializer::kNormal;
  double init_std = 0.02;
  bool weight_decay = true;
  // Partial gradients of a micro-batch: two where an embedding is the output layer, too.
  int partials = 1;
  // false: no gradient. Weights are then frozen: layers compute with them, the input's gradient
  // passes through them, and of a matrix (rows > 1) in a store of a 16-bit type the compute copy is
  // all there is: 2 bytes an element, where a trained one has 6.
  bool trainable = true;
  // State of a layer that the host reads and writes, and that is not trained (a router's expert
  // bias): memory of the host whatever the store's.
  bool host_state = false;
  // The layer reads it by rows that need not lie together: its values may be borrowed
  // (ParameterStore::Borrow).
  bool borrowable = false;
  // The canonical tensors it consists of, one behind the other in memory; empty: one of its own
  // name and shape that tensor parallelism does not cut.
  std::vector<CanonicalTensor> parts = {};
};

// `spec` as one canonical tensor, of its own name and shape, that tensor parallelism cuts: its
// holders become kData, where they were kStage.
ParameterSpec CutAlong(TensorAxis axis, ParameterSpec spec, int64_t item = kCutItem);

// Whole rows of a parameter, in memory that the store does not own and nobody writes.
struct BorrowedRows {
  absl::Span<const std::byte> values = {};  // of the store's compute type
  std::shared_ptr<const void> owner = {};   // keeps them
};

// One tensor on this rank, in memory of the store's device, or of the host (ParameterSpec).
class Parameter {
 public:
  const ParameterSpec& spec() const { return spec_; }
  int64_t size() const { return spec_.rows * spec_.cols; }
  // One row or column: layers may read it in float32, whatever the store's type.
  bool is_vector() const { return spec_.rows == 1 || spec_.cols == 1; }
  absl::Span<const CanonicalTensor> parts() const { return spec_.parts; }  // never empty
  // What this rank holds of parts()[part]: all of it, as no group of ranks shares a tensor out.
  TensorBox box(size_t part) const { return spec_.parts[part].box(); }

  bool frozen() const { return !spec_.trainable && !spec_.host_state; }
  // Empty for a frozen matrix of a 16-bit type, and where ZeRO has left it to the optimisers of
  // several ranks (ParameterStore::Pack).
  absl::Span<float> master() const { return master_; }
  // A copy of the values, once `stream` has passed what is in it. Blocks the host.
  // kFailedPrecondition after ParameterStore::Pack.
  absl::StatusOr<std::vector<float>> ReadMaster(Stream& stream) const;
  // The values layers compute with, [rows, cols]: the master itself for float, a rounded copy for
  // BFloat16 and Float16 (present when it is the store's compute type).
  template <typename T>
  MatrixView<const T> view() const;
  // false where parts() were borrowed one by one: view<T>() may not be called then.
  bool contiguous() const { return borrowed_.size() < 2; }
  // The rows of parts()[i].
  template <typename T>
  MatrixView<const T> part(size_t i) const;
  absl::Span<const float> vector() const {
    MOE_CHECK(has_master());
    return master_;
  }
  // What all ranks of the group have of it, in row-major order: the master, or the compute copy
  // without one, in one piece or, where it is borrowed so, in several.
  std::vector<absl::Span<const std::byte>> replica() const;
  // A copy of it on the host, once `stream` has passed what is in it. Blocks.
  absl::StatusOr<Buffer> ReadReplica(Stream& stream) const;
  // Grows with every RefreshCompute, Adopt and Borrow: what is made of weights is of one version.
  int64_t version() const { return version_; }

  // Whether partial gradients have somewhere to add up. A GradientReducer gives every trainable
  // parameter a sum in its first step.
  bool has_sum() const { return open_sum_ != nullptr; }
  // Where the partial gradients of this round add up. Where sums travel in every round the first
  // call of a bucket may take memory, and the compute stream then waits for the bucket that had
  // this memory before. kFailedPrecondition without a sum; kResourceExhausted.
  absl::StatusOr<GradAccumulator> OpenGradient() const;
  // The bucket in which the sum travels, where it travels in every round; else -1. A bucket is held
  // from its first OpenGradient until all of its gradients are complete, so whoever has gradients
  // of many parameters completes those of one bucket before the next.
  int round_bucket() const { return round_bucket_; }
  // For the GradientReducer: what OpenGradient returns.
  void set_sum(std::function<absl::StatusOr<GradAccumulator>()> open, int round_bucket = -1) {
    open_sum_ = std::move(open);
    round_bucket_ = round_bucket;
  }

  // Position in ParameterStore::parameters(); the same on all ranks of the parameter's group.
  int index() const { return index_; }
  // That of the first parameter of its slab; of one that was added alone, its own.
  int slab() const { return slab_; }

 private:
  friend class ParameterStore;
  ParameterSpec spec_;
  int index_ = 0, slab_ = 0;
  absl::Status CheckWhole(const char* function) const;
  absl::Status CheckMaster(const char* function) const;
  bool has_master() const { return static_cast<int64_t>(master_.size()) == size(); }

  DType type_ = DType::kFloat32;  // of compute_
  absl::Span<float> master_;
  absl::Span<std::byte> compute_;  // empty for float, and where the values are borrowed
  std::vector<BorrowedRows> borrowed_;
  // Their memory, shared by the parameters of a slab; nullptr where it was adopted, borrowed or
  // packed.
  std::shared_ptr<const Buffer> owned_, owned_compute_;
  bool packed_ = false, shared_ = false;
  int64_t version_ = 0;
  std::function<absl::StatusOr<GradAccumulator>()> open_sum_;  // none: has_sum() is false
  int round_bucket_ = -1;
};
template <>
MatrixView<const float> Parameter::view<float>() const;

// Called when the gradient of a parameter, one that is trained, is complete for this round.
using GradientReady = absl::FunctionRef<absl::Status(Parameter&)>;

// What layers read of some parameters, in one block: parameter i from byte first_byte[i] on, in
// elements of element_bytes[i], and at the end the block's size.
struct PackedParameters {
  absl::Span<uint8_t> block;
  std::vector<int64_t> first_byte, element_bytes;
};

// Elements from `begin` on of a parameter's master, as they are now.
struct MasterPart {
  Parameter* parameter;
  int64_t begin;
  absl::Span<const float> values;
};

// Of the device whose memory `parameter` is.
inline Stream& StreamOf(const Parameter& parameter, const Context& context) {
  return parameter.spec().host_state ? *context.host : *context.compute;
}

// What the parameters of a store are for.
enum class StoreUse : uint8_t {
  kTraining,
  kReading,    // they start as zeros, since a file has their values: nothing is drawn
  kInference,  // the same, and none of them is trainable
};

// Owns the parameters that live on this rank, in the order they were added (forward order).
class ParameterStore {
 public:
  // compute: kFloat32, kBFloat16 or kFloat16. Initial values are a function of (seed, name,
  // element) alone: they do not depend on the layout. Memory of the device that `context` computes
  // on, initial values by its rank's threads; the session outlives the store.
  ParameterStore(DType compute, uint64_t seed, const Context& context)
      : compute_(compute),
        seed_(seed),
        memory_(*context.memory),
        threads_(context.host->threads()) {}
  // On the CPU, by the calling thread alone.
  ParameterStore(DType compute, uint64_t seed)
      : compute_(compute), seed_(seed), memory_(CpuMemory()), threads_(ThreadPool::Serial()) {}

  // kInvalidArgument for a name already there, a negative size, trained host state, or parts that
  // are not as large as the whole; kResourceExhausted. Initial values are there on return.
  absl::StatusOr<Parameter*> Add(const ParameterSpec& spec);
  // One Add after the other of specs that differ in names (and parts) alone, whose values lie one
  // behind the other, in one slab [specs, rows, cols], until Adopt: what one product of a CUDA
  // device reads of many experts. kInvalidArgument also for specs of several shapes or groups.
  absl::StatusOr<std::vector<Parameter*>> AddSlab(absl::Span<const ParameterSpec> specs);

  // Of the parameters that are added from now on.
  void set_use(StoreUse use) { use_ = use; }

  DType compute() const { return compute_; }
  const MemoryResource& memory() const { return memory_; }
  absl::Span<const std::unique_ptr<Parameter>> parameters() const { return parameters_; }
  // nullptr where this rank holds none of that name, as of other ranks' experts.
  Parameter* Find(absl::string_view name) const;
  // Whether `parameter` is the last of its slab.
  bool EndsSlab(const Parameter& parameter) const;

  // From now on the master is `values`, [rows * cols] in row-major order, memory of the host: what
  // is in it counts, layers read it and the optimiser writes it. The caller keeps it until another
  // Adopt of the parameter, or until the store is gone. Not between a Forward and its Backward.
  // Memory that the master is already in costs one comparison and changes nothing: a host whose
  // framework can move a tensor calls this before every Forward. The store's own is given back once
  // all masters of a slab were adopted. Blocks.
  // kInvalidArgument for another size; kUnimplemented where the master is memory of a CUDA device;
  // kFailedPrecondition where there is none.
  absl::Status Adopt(Parameter& parameter, absl::Span<float> values);
  // The other way: the master's memory for a tensor of the host's framework, on any device. It
  // stays while somebody has what is returned, after the store, too, and from now on it is the
  // master's for good, but for an Adopt. kFailedPrecondition where there is no master.
  absl::StatusOr<std::shared_ptr<float>> Share(Parameter& parameter) const;

  // Whether Borrow can have the values of this parameter: it is `borrowable`, has no master, and is
  // memory of the host.
  bool CanBorrow(const Parameter& parameter) const;
  // From now on the values are `rows`, in memory that their owner keeps and nobody writes, and the
  // parameter's own memory is given back: one block of all, or one for each of its parts(). Not
  // between a Forward and its Backward. kInvalidArgument for other sizes or an odd address;
  // kFailedPrecondition unless CanBorrow.
  absl::Status Borrow(Parameter& parameter, std::vector<BorrowedRows> rows) const;

  // Overwrites the values, in the master and, rounded, in the compute copy: all, or from `first` on
  // in row-major order as many as there are. `values`: memory of the host, read before the call
  // returns. `stream` as below. kInvalidArgument for another number, or one beyond the end;
  // kFailedPrecondition where they are borrowed.
  absl::Status WriteMaster(Parameter& parameter, absl::Span<const float> values, Stream& stream,
                           std::optional<int64_t> first = {}) const;

  // Rounds the master into the compute copy; after every change of the master. `stream`: StreamOf.
  // Without a master: the copy has changed.
  absl::Status RefreshCompute(Parameter& parameter, Stream& stream) const;

  // For ranks that share out what each keeps of the masters (ZeRO). What layers read of trainable
  // `parameters` moves into one block of the store's, so that ranks can gather it at once: masters
  // in float, compute copies else, but masters of vectors (a row or a column), which layers read as
  // they are. Other masters are given up: the caller has copied what it keeps of them, and rounds
  // it by RefreshParts. From then on Adopt, WriteMaster and ReadMaster give kFailedPrecondition.
  // Slabs stay slabs: their parameters come whole and in order. Blocks. kFailedPrecondition for a
  // parameter whose master was adopted or shared; kResourceExhausted.
  absl::StatusOr<PackedParameters> Pack(absl::Span<Parameter* const> parameters, Stream& stream);

  // Rounds parts of masters into the compute copies: on a CUDA device in one launch, whatever their
  // number. They may be empty where a compute copy has changed. Enqueued on context.compute.
  absl::Status RefreshParts(absl::Span<const MasterPart> parts, const Context& context) const;

  // Elements on this rank, the bytes of masters and compute copies that the store owns, and those
  // of values that it borrows.
  int64_t total_size() const;
  int64_t bytes() const;
  int64_t borrowed_bytes() const;

 private:
  absl::StatusOr<std::unique_ptr<Parameter>> Make(const ParameterSpec& spec) const;
  absl::Status Allocate(absl::Span<const std::unique_ptr<Parameter>> slab) const;
  bool OnDevice(const Parameter& parameter) const;  // a CUDA device
  absl::Status RefreshPart(const MasterPart& part, Stream& stream) const;
  template <typename T>
  absl::Status RoundParts(absl::Span<const MasterPart> parts, const Context& context) const;
  absl::Status Fill(Parameter& parameter);  // with the initial values

  const DType compute_;
  const uint64_t seed_;
  StoreUse use_ = StoreUse::kTraining;
  MemoryResource& memory_;
  ThreadPool& threads_;
  std::unique_ptr<Stream> upload_;  // CUDA devices, once there is a parameter
  std::vector<Buffer> packed_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
};

}  // namespace moe

#endif  // MOE_MOE_STATE_PARAMETER_H_
