// The weights of one MoE layer in a Hugging Face checkpoint.
#ifndef MOE_MOE_HF_HF_WEIGHTS_H_
#define MOE_MOE_HF_HF_WEIGHTS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/hf/hf_config.h"
#include "moe/hf/tensor_layout.h"
#include "moe/hf/tensor_rule.h"
#include "moe/io/checkpoint.h"
#include "moe/state/parameter.h"

namespace moe::hf {

// A tensor of the layer: of one expert, of all experts, or of none.
struct LayerTensor {
  const TensorRule* rule = nullptr;
  int32_t expert = 0;  // kNumbered: the expert that it belongs to
  CheckpointTensor found;
};

// Element types of weights and tokens.
bool IsReadable(SafetensorsType type);
inline constexpr char kReadableTypes[] = "F32, F16, BF16 or F64";

// A tensor of a checkpoint that must have this shape and a readable type. kDataLoss "<file>: tensor
// '<name>': what is, what was expected".
absl::StatusOr<CheckpointTensor> FindTensor(Checkpoint& checkpoint, const std::string& name,
                                            absl::Span<const int64_t> shape);

// Rows [first, first + count) of the first dimension, as a tensor of the same file.
SafetensorsTensor RowsOf(const SafetensorsTensor& tensor, int64_t first, int64_t count);
// The elements of a tensor from `first` on, with `shape`, as a tensor of the same file.
SafetensorsTensor PartOf(const SafetensorsTensor& tensor, int64_t first,
                         std::vector<int64_t> shape);

// Where the values of matrices are stored once they are loaded.
enum class LoadBy : uint8_t {
  kCopy,  // in the store's own memory
  // In the checkpoint's mapped files, wherever they are stored there as the store would store them:
  // frozen experts (MoeLayerConfig::train_experts, shared ones too) without pack_weights, on the
  // CPU, in the store's 16-bit type, as rows in the layer's order, at an even address. All else is
  // copied; ParameterStore::borrowed_bytes reports how much is not. The store owns the mappings;
  // the files must not change meanwhile (MappedFile).
  kBorrow,
};

// Borrows `parameter` for kBorrow: `rows` in their order, each nullopt if no file stores it as
// required. Returns false, with nothing done, unless all rows are there. Errors of
// ParameterStore::Borrow.
absl::StatusOr<bool> BorrowIfWhole(const ParameterStore& store, Parameter& parameter,
                                   absl::Span<const std::optional<BorrowedRows>> rows);
// `part`, rows of a tensor in `file`, in place if it is stored as a store that computes in `type`
// stores it.
std::optional<BorrowedRows> RowsToBorrow(const SafetensorsFile& file, const SafetensorsTensor& part,
                                         DType type);

// The tensors of one layer, all found, with the right shapes and readable element types. Keeps the
// checkpoint open. Move-only; reading is thread-safe.
class LayerWeights {
 public:
  // Finds the tensors of `layer`; empty = the first layer that has experts both in the checkpoint
  // and by the configuration. Names start with one of kRoots and belong to one of the family's
  // layouts (tensor_layout.h). Reads no data.
  //   kOutOfRange: by the configuration `layer` is not a layer with experts
  //   kDataLoss: a tensor is missing, in two layouts or not as configured, or an
  //     error of a file
  // Messages: "<file>: tensor '<name>': what is, what was expected".
  static absl::StatusOr<LayerWeights> Find(const HfConfig& config, Checkpoint checkpoint,
                                           std::optional<int64_t> layer);
  LayerWeights(LayerWeights&&) = default;
  LayerWeights& operator=(LayerWeights&&) = default;
  // All layers with experts by the configuration, in order; they share the checkpoint.
  static absl::StatusOr<std::vector<LayerWeights>> FindAll(const HfConfig& config,
                                                           Checkpoint checkpoint);

  int64_t layer() const { return layer_; }
  // Layers with experts that could have been chosen.
  absl::Span<const int64_t> available_layers() const { return available_; }
  const std::string& path() const { return checkpoint_->path(); }
  const HfConfig& config() const { return config_; }
  absl::Span<const LayerTensor> tensors() const { return tensors_; }

  // Overwrites the values of all parameters of `store` whose names start with `prefix`, and
  // refreshes their compute copies. They belong to a layer created with that prefix and
  // config().moe, whichever experts this rank holds. Several layers of one store have a prefix
  // each. Scratch: one tensor; of stacked ones one expert's part. Blocks.
  //   stream  a stream of the device whose memory holds the weights
  //   host    a stream for state in host memory, ParameterSpec::host_state
  // Errors, before anything is overwritten:
  //   kNotFound: no name starts with `prefix`
  //   kInvalidArgument, naming the parameter: the checkpoint's layer has none of its name or size,
  //     or has a parameter that the store lacks, of the layer or of an expert held in part
  absl::Status Load(ParameterStore& store, Stream& stream, Stream& host,
                    absl::string_view prefix = "", LoadBy by = LoadBy::kCopy) const;

 private:
  LayerWeights(const HfConfig& config, std::shared_ptr<Checkpoint> checkpoint)
      : config_(config), checkpoint_(std::move(checkpoint)) {}
  static absl::StatusOr<LayerWeights> Find(const HfConfig& config,
                                           std::shared_ptr<Checkpoint> checkpoint,
                                           std::optional<int64_t> layer);
  // `prefix`: the name of the block
  absl::Status FindTensors(const std::string& prefix);
  // Calls visit(tensor, expert, part) with each tensor's part of a parameter; visit returns
  // absl::Status.
  template <typename Visit>
  absl::Status ForEachPart(Visit visit) const;
  // Removes from `by_name` the parameters whose values `store` now borrows.
  absl::Status Borrow(ParameterStore& store, std::map<std::string, Parameter*>& by_name) const;
  // The parameters of `store` below `prefix`, by their names in a layer without a prefix.
  absl::StatusOr<std::map<std::string, Parameter*>> ParametersToLoad(
      const ParameterStore& store, absl::string_view prefix) const;

  HfConfig config_;
  std::shared_ptr<Checkpoint> checkpoint_;  // shared by the layers of FindAll
  int64_t layer_ = 0;
  std::vector<int64_t> available_;
  TensorLayout layout_;
  std::vector<LayerTensor> tensors_;  // in the order of the layout's rules
};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_HF_WEIGHTS_H_
