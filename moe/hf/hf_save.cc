#include "moe/hf/hf_save.h"

#include <vector>

#include <absl/strings/str_cat.h>

#include "comm/extremes.h"
#include "dispatch/placement.h"
#include "kernels/base/status_macros.h"
#include "moe/hf/family.h"

namespace moe::hf {
namespace {

// What one parameter has of a tensor.
struct Piece {
  const TensorRule* rule = nullptr;
  std::string parameter;
  int owner = 0;  // the rank of the world that sends it
};

struct Tensor {
  SafetensorsEntry entry;
  std::vector<Piece> pieces;  // one behind the other
};

std::vector<Tensor> TensorsOf(const HfConfig& config, absl::Span<const StoredLayer> layers,
                              DType type, int expert_ranks) {
  const int32_t experts = config.moe.router.num_experts;
  const ExpertPlacement placement(experts, expert_ranks);
  std::vector<Tensor> tensors;
  for (const StoredLayer& layer : layers) {
    for (const TensorRule& rule : config.family->tensors) {
      if (!IsPresent(rule, config.moe)) continue;
      const auto piece = [&](int32_t expert) -> Piece {
        return {.rule = &rule,
                .parameter = layer.prefix + ParameterName(rule.parameter, expert),
                .owner = rule.experts == ExpertAxis::kNone ? 0 : placement.RankOf(expert)};
      };
      for (int32_t e = 0; e < (rule.experts == ExpertAxis::kNumbered ? experts : 1); ++e) {
        Tensor& tensor = tensors.emplace_back();
        tensor.entry = {.name = absl::StrCat("model.layers.", layer.layer, ".",
                                             config.family->block, ".", TensorName(rule, e)),
                        .type = SafetensorsTypeOf(type),
                        .shape = TensorShape(rule, config.moe),
                        .size_bytes = SizeOf(type)};
        for (const int64_t size : tensor.entry.shape) tensor.entry.size_bytes *= size;
        if (rule.experts != ExpertAxis::kStacked) {
          tensor.pieces = {piece(e)};
          continue;
        }
        for (int32_t expert = 0; expert < experts; ++expert) {
          tensor.pieces.push_back(piece(expert));
        }
      }
    }
  }
  return tensors;
}

// Pieces of the tensors on rank 0, in order. A rank that cannot read one says so in its place.
class PieceReader {
 public:
  PieceReader(const MoeLayerConfig& config, const ParameterStore& store, const Context& context)
      : config_(config), store_(store), context_(context) {}

  // On rank 0 the values, else none.
  absl::StatusOr<absl::Span<const float>> Next(const Piece& piece) {
    Communicator& world = context_.mesh->world();
    const int64_t size = SizeOfPiece(*piece.rule);
    values_.assign(static_cast<size_t>(size) + 1, 0);  // the last one: whether it failed
    absl::Status status;
    if (piece.owner == world.rank()) status = Read(piece);
    if (!status.ok()) values_.back() = 1;
    if (piece.owner != 0 && (piece.owner == world.rank() || world.rank() == 0)) {
      const bool receives = world.rank() == 0;
      const SendRecvOp op = {.peer = receives ? piece.owner : 0,
                             .send = receives ? nullptr : values_.data(),
                             .recv = receives ? values_.data() : nullptr,
                             .bytes = std::ssize(values_) * static_cast<int64_t>(sizeof(float))};
      MOE_RETURN_IF_ERROR(world.SendRecv({&op, 1}, *context_.host));
    }
    MOE_RETURN_IF_ERROR(status);
    if (values_.back() != 0) {
      return absl::AbortedError(absl::StrCat("SaveLayers: rank ", piece.owner, " has no '",
                                             piece.parameter, "' to save"));
    }
    return absl::MakeConstSpan(values_).first(world.rank() == 0 ? size : 0);
  }

 private:
  int64_t SizeOfPiece(const TensorRule& rule) const {
    const bool half = rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp;
    return ShapeOf(rule.parameter, config_).size() / (half ? 2 : 1);
  }
  absl::Status Read(const Piece& piece) {
    const Parameter* const parameter = store_.Find(piece.parameter);
    const int64_t size = ShapeOf(piece.rule->parameter, config_).size();
    if (parameter == nullptr || parameter->size() != size) {
      return absl::InvalidArgumentError(
          absl::StrCat("SaveLayers: parameter '", piece.parameter, "' ",
                       parameter == nullptr ? "is not in the store"
                                            : absl::StrCat("has ", parameter->size(), " elements"),
                       ", expected it with ", size));
    }
    MOE_ASSIGN_OR_RETURN(const std::vector<float> whole,
                         parameter->ReadMaster(StreamOf(*parameter, context_)));
    ForEachElement(*piece.rule, config_,
                   [&](int64_t i, int64_t j) { values_[static_cast<size_t>(j)] = whole[i]; });
    return absl::OkStatus();
  }

  const MoeLayerConfig& config_;
  const ParameterStore& store_;
  const Context& context_;
  std::vector<float> values_;
};

}  // namespace

absl::Status SaveLayers(const HfConfig& config, absl::Span<const StoredLayer> layers,
                        const ParameterStore& store, const Context& context,
                        const SaveOptions& options) {
  Communicator& world = context.mesh->world();
  const std::vector<Tensor> tensors =
      TensorsOf(config, layers, options.type, context.mesh->expert_parallel().size());
  std::vector<SafetensorsEntry> entries;
  for (const Tensor& tensor : tensors) entries.push_back(tensor.entry);
  PieceReader reader(config.moe, store, context);
  std::vector<std::pair<size_t, const Piece*>> pieces;  // by tensor
  for (size_t i = 0; i < tensors.size(); ++i) {
    for (const Piece& piece : tensors[i].pieces) pieces.emplace_back(i, &piece);
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
