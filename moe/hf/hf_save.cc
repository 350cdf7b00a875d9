#include "moe/hf/hf_save.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "dispatch/placement.h"
#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"
#include "moe/hf/tensor_pieces.h"

namespace moe::hf {
namespace {

struct Tensor {
  SafetensorsEntry entry;
  std::vector<TensorPiece> pieces;
};

std::vector<Tensor> TensorsOf(const HfConfig& config, absl::Span<const StoredLayer> layers,
                              DType type, int expert_ranks) {
  const ExpertPlacement placement(config.moe.router.num_experts, expert_ranks);
  std::vector<Tensor> tensors;
  for (const StoredLayer& layer : layers) {
    for (const TensorRule& rule : config.family->tensors) {
      if (!IsPresent(rule, config.moe)) continue;
      for (int32_t e = 0; e < TensorCount(rule, config.moe); ++e) {
        Tensor& tensor = tensors.emplace_back();
        tensor.entry = {.name = absl::StrCat("model.layers.", layer.layer, ".",
                                             config.family->block, ".", TensorName(rule, e)),
                        .type = SafetensorsTypeOf(type),
                        .shape = TensorShape(rule, config.moe),
                        .size_bytes = SizeOf(type)};
        for (const int64_t size : tensor.entry.shape) tensor.entry.size_bytes *= size;
        tensor.pieces = PiecesOf(rule, e, layer.prefix, placement);
      }
    }
  }
  return tensors;
}

}  // namespace

absl::Status SaveLayers(const HfConfig& config, absl::Span<const StoredLayer> layers,
                        const ParameterStore& store, const Context& context,
                        const SaveOptions& options) {
  Communicator& world = context.mesh->world();
  const std::vector<Tensor> tensors =
      TensorsOf(config, layers, options.type, context.mesh->size(MeshGroup::kExpertBlock));
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : tensors) entries.push_back(tensor.entry);
  const auto read = [&](const Parameter& parameter) {
    return parameter.ReadMaster(StreamOf(parameter, context));
  };
  PieceReader reader("SaveLayers", config.moe, store, context, read);
  std::vector<std::pair<size_t, const TensorPiece*>> pieces;  // by tensor
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const TensorPiece& piece : tensors[i].pieces) pieces.emplace_back(i, &piece);
  }
  size_t next = 0;
  absl::Status status;
  if (world.rank() == 0) {
    const auto append = [&](size_t i, SafetensorsStream& stream) -> absl::Status {
      while (next < pieces.size() && pieces[next].first == i) {
        MOE_ASSIGN_OR_RETURN(const auto values, reader.Next(*pieces[next++].second));
        MOE_RETURN_IF_ERROR(AppendRounded(entries[i].name, values, options.type, stream));
      }
      return absl::OkStatus();
    };
    status = WriteModelFiles(options.folder, entries, options.max_shard_bytes, append);
  }
  // After a failure on rank 0 too: other ranks send all that they have.
  while (next < pieces.size()) status.Update(reader.Next(*pieces[next++].second).status());
  MOE_ASSIGN_OR_RETURN(const auto failed,
                       ExtremesOverRanks({status.ok() ? 0 : 1}, world, *context.host));
  if (status.ok() && failed[0].most != 0) {
    return absl::AbortedError("SaveLayers: another rank could not save its part");
  }
  return status;
}

}  // namespace moe::hf
