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
  // Group of the ranks that hold the same values, over which gradients are summed: kStage, or kData
  // where tensor parallelism would cut the parameter; kExpertData, or kExpertHolders of what ranks
  // that share experts hold whole; kEnds.
  MeshGroup holders = MeshGroup::kStage;
  Initializer initializer = Initializer::kNormal;
  double init_std = 0.02;
  bool weight_decay = true;
  // Number of partial gradients per micro-batch: two where an embedding is also the output layer.
  int partials = 1;
  // false: frozen, without a gradient. Layers compute with frozen weights and pass the input's
  // gradient through them; a frozen matrix (rows > 1) in a store of a 16-bit type has only its
  // compute copy: 2 bytes an element, where a trained one has 6.
  bool trainable = true;
  // State of a layer that the host reads and writes and that is not trained (a router's expert
  // bias): always memory of the host.
  bool host_state = false;
  // The layer reads the parameter by rows that need not be contiguous: its values may be borrowed
  // (ParameterStore::Borrow).
  bool borrowable = false;
  // The canonical tensors of the parameter, one behind the other in memory; empty: a single one of
  // its name and shape, which tensor parallelism does not cut.
  std::vector<CanonicalTensor> parts = {};
  // Box of each of `parts` that this rank holds, row by row; empty: all of each. rows * cols is the
  // size of all boxes.
  std::vector<TensorBox> boxes = {};
};

// `spec` with one canonical tensor, of its own name and shape, that tensor parallelism cuts:
// holders kStage become kData.
ParameterSpec CutAlong(TensorAxis axis, ParameterSpec spec, int64_t item = kCutItem);

// Whole rows of a parameter, in memory that the store does not own and nothing writes.
struct BorrowedRows {
  absl::Span<const std::byte> values = {};  // rows in the store's compute type
  std::shared_ptr<const void> owner = {};   // keeps the memory alive
};

// One tensor on this rank, in memory of the store's device or of the host
// (ParameterSpec::host_state).
class Parameter {
 public:
  const ParameterSpec& spec() const { return spec_; }
  int64_t size() const { return spec_.rows * spec_.cols; }
  // A single row or column: layers may read it in float32, whatever the store's type.
  bool is_vector() const { return spec_.rows == 1 || spec_.cols == 1; }
  absl::Span<const CanonicalTensor> parts() const { return spec_.parts; }  // never empty
  // Box of parts()[part] that this rank holds.
  TensorBox box(size_t part) const { return spec_.boxes[part]; }

  bool frozen() const { return !spec_.trainable && !spec_.host_state; }
  // Empty for a frozen matrix of a 16-bit type, and where ZeRO leaves the master to the optimisers
  // of several ranks (ParameterStore::Pack).
  absl::Span<float> master() const { return master_; }
  // A copy of the values, after the work that is in `stream`. Blocks the host. kFailedPrecondition
  // after ParameterStore::Pack.
  absl::StatusOr<std::vector<float>> ReadMaster(Stream& stream) const;
  // Values that layers compute with, [rows, cols], of the store's compute type: the master itself
  // for float, a rounded copy for BFloat16 and Float16. A module reads view, part and vector under
  // a WeightLease (weight_lease.h).
  template <typename T>
  MatrixView<const T> view() const;
  // false where parts() were borrowed one by one: view<T>() must not be called then.
  bool contiguous() const { return borrowed_.size() < 2; }
  // The rows of box(i), each as wide as the parameter.
  template <typename T>
  MatrixView<const T> part(size_t i) const;
  absl::Span<const float> vector() const;
  // Values that all ranks of the group hold, in row-major order: the master, or without one the
  // compute copy; in one span or, if borrowed so, in several. Empty where the values are in parts.
  std::vector<absl::Span<const std::byte>> replica() const;
  // A copy of replica() on the host, after the work that is in `stream`. Blocks.
  absl::StatusOr<Buffer> ReadReplica(Stream& stream) const;
  // Version of the values, for anything derived from them; grows with every RefreshCompute, Adopt
  // and Borrow.
  int64_t version() const { return version_; }

  // Whether partial gradients have a sum to be added to. A GradientReducer gives every trainable
  // parameter one in its first step.
  bool has_sum() const { return open_sum_ != nullptr; }
  // Accumulator of the partial gradients of this round. Where sums travel in every round, the first
  // call for a bucket may allocate memory, and the compute stream then waits for the bucket that
  // used this memory before. kFailedPrecondition without a sum; kResourceExhausted.
  absl::StatusOr<GradAccumulator> OpenGradient() const;
  // Bucket in which the sum travels, if sums travel in every round; otherwise -1. A bucket is open
  // from its first OpenGradient until all of its gradients are complete, so a module with gradients
  // of many parameters completes those of one bucket before the next.
  int round_bucket() const { return round_bucket_; }
  // For the GradientReducer: what OpenGradient returns.
  void set_sum(std::function<absl::StatusOr<GradAccumulator>()> open, int round_bucket = -1) {
    open_sum_ = std::move(open);
    round_bucket_ = round_bucket;
  }

  // Position in ParameterStore::parameters(); the same on all ranks of the parameter's group.
  int index() const { return index_; }
  // Index of the first parameter of its slab; its own index if it was added alone.
  int slab() const { return slab_; }
  // Chunk of a pipeline stage whose backward completes the gradient (ParameterStore::set_chunk).
  int chunk() const { return chunk_; }

 private:
  friend class ParameterStore;
  ParameterSpec spec_;
  int index_ = 0, slab_ = 0, chunk_ = 0;
  absl::Status CheckWhole(const char* function) const;
  absl::Status CheckMaster(const char* function) const;
  bool has_master() const { return static_cast<int64_t>(master_.size()) == size(); }
  absl::Span<const std::byte> values() const;  // what view returns

  DType type_ = DType::kFloat32;  // type of compute_
  absl::Span<float> master_;
  absl::Span<std::byte> compute_;  // empty for float, and where the values are borrowed
  std::vector<BorrowedRows> borrowed_;
  // What layers read instead of the store's values (ParameterStore::SetValues).
  std::optional<absl::Span<const std::byte>> elsewhere_;
  // Memory of the values, shared by the parameters of a slab; nullptr where it was adopted,
  // borrowed or packed.
  std::shared_ptr<const Buffer> owned_, owned_compute_;
  bool packed_ = false, in_parts_ = false, shared_ = false;
  bool deferred_ = false;  // no memory so far
  int64_t version_ = 0;
  std::function<absl::StatusOr<GradAccumulator>()> open_sum_;  // empty: has_sum() is false
  int round_bucket_ = -1;
};

// Called when the gradient of a trained parameter is complete for this round.
using GradientReady = absl::FunctionRef<absl::Status(Parameter&)>;

// What layers read of some parameters, in one block: parameter i starts at byte first_byte[i], a
// multiple of kPackedLine where a slab starts, and has elements of element_bytes[i]; the last
// first_byte is the block's size.
inline constexpr int64_t kPackedLine = 64;
struct PackedParameters {
  absl::Span<uint8_t> block;
  std::vector<int64_t> first_byte, element_bytes;
};

// Current elements of a parameter's master, from `begin` on, and their rounded copy where it is not
// in the parameter.
struct MasterPart {
  Parameter* parameter;
  int64_t begin;
  absl::Span<const float> values;
  absl::Span<std::byte> copy = {};
};

// Stream of the device whose memory `parameter` is.
inline Stream& StreamOf(const Parameter& parameter, const Context& context) {
  return parameter.spec().host_state ? *context.host : *context.compute;
}

// Use of the parameters of a store.
enum class StoreUse : uint8_t {
  kTraining,
  kReading,    // initialised to zeros, since a file holds their values: nothing is drawn
  kInference,  // as kReading, and none of them is trainable
};

// Memory for values of parameters; nullptr: memory of the store's device, or of the host.
struct ParameterMemory {
  MemoryResource* values = nullptr;   // what layers read of matrices
  MemoryResource* masters = nullptr;  // masters of matrices that layers read in 16 bits
};

// Owns the parameters of this rank, in the order in which they were added (forward order).
class ParameterStore {
 public:
  // compute: kFloat32, kBFloat16 or kFloat16. Initial values are a function of (seed, name, element
  // of the whole parameter, all of whose parts are whole) alone: they depend neither on the layout
  // nor on the boxes that a rank holds. Parameters are memory of the device that `context` computes
  // on, and the threads of its rank compute the initial values; the session must outlive the store.
  ParameterStore(DType compute, uint64_t seed, const Context& context)
      : compute_(compute),
        seed_(seed),
        memory_(*context.memory),
        threads_(context.host->threads()) {}
  // A store on the CPU, used by the calling thread alone.
  ParameterStore(DType compute, uint64_t seed)
      : compute_(compute), seed_(seed), memory_(CpuMemory()), threads_(ThreadPool::Serial()) {}

  // kInvalidArgument for a name already in use, a negative size, trained host state, boxes that are
  // not one in each part, or whose sizes do not add up to rows * cols; kResourceExhausted. Initial
  // values are complete on return.
  absl::StatusOr<Parameter*> Add(const ParameterSpec& spec);
  // Add for several specs that differ only in names (and parts). Until Adopt their values are
  // contiguous, in one slab [specs, rows, cols], so that one product of a CUDA device can read many
  // experts. kInvalidArgument also for specs of several shapes or groups.
  absl::StatusOr<std::vector<Parameter*>> AddSlab(absl::Span<const ParameterSpec> specs);

  // Sets the use of the parameters that are added from now on.
  void set_use(StoreUse use) { use_ = use; }
  // For ranks that keep parts of weights (ZeRO-3, WeightPager), so that none has the whole model at
  // a time: trainable parameters, and all but host state of a store for inference, that are added
  // from now on have neither memory nor values until Provide or WriteMaster. Until then Adopt,
  // Share and ReadMaster return kFailedPrecondition.
  void set_deferred() { defers_ = true; }
  // Allocates those of `parameters`, with the rest of their slabs, that have no memory so far, and
  // writes their initial values. kResourceExhausted.
  absl::Status Provide(absl::Span<Parameter* const> parameters,
                       const ParameterMemory& memory = {}) const;
  // Sets the chunk of the parameters that are added from now on, 0 at first: it never falls.
  void set_chunk(int chunk) { chunk_ = chunk; }

  DType compute() const { return compute_; }
  const MemoryResource& memory() const { return memory_; }
  absl::Span<const std::unique_ptr<Parameter>> parameters() const { return parameters_; }
  // The parameters after the first `count`: what a module has added.
  std::vector<Parameter*> AddedSince(size_t count) const;
  // nullptr where this rank holds no parameter of that name, such as other ranks' experts.
  Parameter* Find(absl::string_view name) const;
  // Whether `parameter` is the last of its slab.
  bool EndsSlab(const Parameter& parameter) const;

  // Makes `values`, [rows * cols] in row-major order, memory of the host, the master from now on:
  // its present content counts, layers read it and the optimiser writes it. The caller keeps it
  // until another Adopt of the parameter, or until the store is destroyed. Not between a Forward
  // and its Backward. Memory that is already the master's costs one comparison and changes nothing:
  // a host whose framework can move a tensor calls this before every Forward. The store's own
  // memory is freed once all masters of a slab were adopted. Blocks. kInvalidArgument for another
  // size; kUnimplemented where the master is memory of a CUDA device; kFailedPrecondition where
  // there is no master.
  absl::Status Adopt(Parameter& parameter, absl::Span<float> values);
  // The reverse: lends the master's memory to a tensor of the host's framework, on any device. The
  // memory lives as long as a returned pointer, also after the store, and remains the master's from
  // now on, unless Adopt replaces it. kFailedPrecondition where there is no master.
  absl::StatusOr<std::shared_ptr<float>> Share(Parameter& parameter) const;

  // Whether Borrow accepts values for this parameter: it is `borrowable`, has no master, and is
  // memory of the host.
  bool CanBorrow(const Parameter& parameter) const;
  // Makes `rows` the values from now on, in memory that their owner keeps and nothing writes, and
  // frees the parameter's own memory: one block of all values, or one for each of its parts(). Not
  // between a Forward and its Backward. kInvalidArgument for other sizes or an odd address;
  // kFailedPrecondition unless CanBorrow.
  absl::Status Borrow(Parameter& parameter, std::vector<BorrowedRows> rows) const;

  // Overwrites values in the master and, rounded, in the compute copy: all of them, or as many as
  // given from `first` on, in row-major order. `values`: memory of the host, read before the call
  // returns. `stream` as below. kInvalidArgument for another number of values, or a range beyond
  // the end; kFailedPrecondition where the values are borrowed.
  absl::Status WriteMaster(Parameter& parameter, absl::Span<const float> values, Stream& stream,
                           std::optional<int64_t> first = {}) const;

  // For a WeightSource (weight_lease.h): layers read `values` from now on, a copy of the
  // parameter's in elements of compute(), in memory of its device. Empty: the values are hidden,
  // and a module that reads them ends the program. nullopt: those of the store again. Values of a
  // vector are float32; what layers read of it in 16 bits stays in the store, for RefreshCompute of
  // the source. Values that are borrowed in parts can only be hidden.
  void SetValues(Parameter& parameter, std::optional<absl::Span<const std::byte>> values) const;

  // Rounds the master into the compute copy; to be called after every change of the master.
  // `stream`: StreamOf. Without a master it only records that the copy has changed.
  absl::Status RefreshCompute(Parameter& parameter, Stream& stream) const;

  // For ranks that divide the masters among themselves (ZeRO). Moves what layers read of trainable
  // `parameters` into one block of the store's, so that ranks can gather it at once: masters in
  // float, otherwise compute copies, and for vectors (a row or a column) always masters, which
  // layers read as they are. All other masters are freed: the caller has copied what it keeps of
  // them, and rounds it by RefreshParts. From then on Adopt, WriteMaster and ReadMaster return
  // kFailedPrecondition. Slabs must be passed whole and in order, and stay slabs. Blocks.
  // kFailedPrecondition for a parameter whose master was adopted or shared; kResourceExhausted.
  absl::StatusOr<PackedParameters> Pack(absl::Span<Parameter* const> parameters, Stream& stream);

  // After Pack: frees its block, of which the caller has copied the part that it keeps. All values
  // of the same `parameters` are hidden until SetValues. Not while a layer reads them.
  void KeepInParts(absl::Span<Parameter* const> parameters);

  // For inference, once the values are complete. DropMaster frees a master that no layer reads, of
  // a matrix in 16 bits; DropValues frees all values of a matrix, which are hidden until SetValues.
  void DropMaster(Parameter& parameter) const;
  void DropValues(Parameter& parameter) const;

  // Rounds parts of masters into the compute copies: on a CUDA device in one launch, whatever their
  // number. `parts` may be empty where a compute copy has changed. Enqueued on context.compute.
  absl::Status RefreshParts(absl::Span<const MasterPart> parts, const Context& context) const;

  // Number of elements on this rank, bytes of the masters and compute copies that the store owns,
  // and bytes of borrowed values.
  int64_t total_size() const;
  int64_t bytes() const;
  int64_t borrowed_bytes() const;

 private:
  absl::StatusOr<std::unique_ptr<Parameter>> Make(const ParameterSpec& spec) const;
  absl::Status Allocate(absl::Span<const std::unique_ptr<Parameter>> slab,
                        const ParameterMemory& memory = {}) const;
  bool OnDevice(const Parameter& parameter) const;  // whether on a CUDA device
  std::byte* CopyOf(const MasterPart& part) const;
  absl::Status RefreshPart(const MasterPart& part, Stream& stream) const;
  template <typename T>
  absl::Status RoundParts(absl::Span<const MasterPart> parts, const Context& context) const;
  absl::Status Fill(Parameter& parameter) const;  // writes the initial values

  const DType compute_;
  const uint64_t seed_;
  StoreUse use_ = StoreUse::kTraining;
  bool defers_ = false;
  int chunk_ = 0;
  MemoryResource& memory_;
  ThreadPool& threads_;
  mutable std::unique_ptr<Stream> upload_;  // for CUDA devices, once there is a parameter
  std::vector<Buffer> packed_;
  std::vector<std::unique_ptr<Parameter>> parameters_;
};

}  // namespace moe

#endif  // MOE_MOE_STATE_PARAMETER_H_
