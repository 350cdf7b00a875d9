// A whole public model in a folder: its configuration, and its weights for a moe::lm::Stage.
#ifndef MOE_MOE_HF_HF_MODEL_H_
#define MOE_MOE_HF_HF_MODEL_H_

#include <map>
#include <set>
#include <string>
#include <vector>

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "moe/hf/hf_weights.h"
#include "moe/hf/model_rule.h"
#include "moe/io/checkpoint.h"
#include "moe/run/context.h"
#include "moe/state/boxes.h"
#include "moe/state/parameter.h"

namespace moe::hf {

// Holds the files open. Move-only; Load is thread-safe, so that ranks that are threads share one.
class HfModel {
 public:
  // `folder` has config.json and model.safetensors, or the index of several. Names start with one
  // of kRoots, and a layer's experts are in one of the family's layouts (tensor_layout.h). Reads no
  // weights but an output layer that config.json ties to the embedding and that the files have,
  // too: where the two differ they are not tied, as transformers 5 has it, which config() and
  // warnings() say. Tensors that are none of the model's are a warning. `upcycling` with experts:
  // `folder` has a dense model, and each expert of a layer is a copy of its network; routers are in
  // no file. Errors of ReadModelConfig and Checkpoint::Open; kDataLoss "<file>: tensor '<name>':
  // what is, what was expected" for one that is missing, in two layouts, or of another shape or
  // type.
  static absl::StatusOr<HfModel> Open(const std::string& folder, const Upcycling& upcycling = {});

  const std::string& folder() const { return folder_; }
  const ModelRule& rule() const { return *config_.rule; }
  const lm::TransformerConfig& config() const { return config_.model; }
  const ModelTraining& training() const { return config_.training; }
  // Fields of config.json that the model does not follow, a line each.
  const std::vector<std::string>& warnings() const { return warnings_; }
  // Each once, in the order of canonical names.
  std::vector<CheckpointTensor> tensors() const;

  // Overwrites the masters of all parameters of `store`, a Stage of config() in any layout, and
  // refreshes their compute copies; routers of an upcycled model stay as they are. Reads what this
  // rank holds, a million elements at a time. kBorrow: experts of a store for inference stay in the
  // mapped files; everything else is copied, including gate and up projections that are not
  // contiguous there (Mixtral's, unless they are fused). Blocks. kInvalidArgument: the store has a
  // parameter that is not the model's, or of other size.
  absl::Status Load(ParameterStore& store, const Context& context, LoadBy by = LoadBy::kCopy) const;

 private:
  HfModel(std::string folder, ModelConfig config, Checkpoint files, const Upcycling& upcycling)
      : folder_(std::move(folder)),
        config_(std::move(config)),
        files_(std::move(files)),
        upcycling_(upcycling) {}
  // A tensor of the files, and the elements of it that a canonical tensor has.
  struct Part {
    CheckpointTensor whole;
    SafetensorsTensor tensor;
  };
  absl::Status FindLayouts();
  absl::Status UntieDifferent();
  absl::Status FindTensors();
  void WarnOfOthers(const std::set<std::string>& names);
  // nullptr unless the model has the tensor, of this size.
  const Part* Find(const CanonicalTensor& tensor) const;
  // Whether `store` now borrows all of it.
  absl::StatusOr<bool> Borrow(const ParameterStore& store, Parameter& parameter) const;
  bool IsFresh(const CanonicalTensor& tensor) const;
  void AddNoise(const CanonicalTensor& tensor, int64_t first, absl::Span<float> values) const;
  // Reads the box alone, and writes its values into `parameter`.
  absl::Status LoadBox(const BoxInMemory& held, Parameter& parameter, const ParameterStore& store,
                       Stream& stream) const;

  std::string folder_;
  ModelConfig config_;
  Checkpoint files_;
  Upcycling upcycling_;
  ModelLayout layout_;
  std::vector<std::string> warnings_;
  std::map<std::string, Part> tensors_;  // by canonical name
};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_HF_MODEL_H_
