#include "moe/hf/tensor_pieces.h"

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

namespace moe::hf {
namespace {

int64_t SizeOfPiece(const TensorRule& rule, const MoeLayerConfig& config) {
  const bool half = rule.rows == TensorRows::kGate || rule.rows == TensorRows::kUp;
  return ShapeOf(rule.parameter, config).size() / (half ? 2 : 1);
}

}  // namespace

std::vector<TensorPiece> PiecesOf(const TensorRule& rule, int32_t expert, const std::string& prefix,
                                  const ExpertPlacement& placement) {
  const auto piece = [&](int32_t e) -> TensorPiece {
    return {.rule = &rule,
            .parameter = prefix + ParameterName(rule.parameter, e),
            .owner = rule.experts == ExpertAxis::kNone ? 0 : placement.RankOf(e)};
  };
  if (rule.experts != ExpertAxis::kStacked) return {piece(expert)};
  std::vector<TensorPiece> pieces;
  for (int32_t e = 0; e < placement.num_experts(); ++e) pieces.push_back(piece(e));
  return pieces;
}

absl::StatusOr<absl::Span<const float>> PieceReader::Next(const TensorPiece& piece) {
  Communicator& world = context_.mesh->world();
  const int64_t size = SizeOfPiece(*piece.rule, config_);
  // the last one reports whether the owner failed
  values_.assign(static_cast<size_t>(size) + 1, 0);
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
    return absl::AbortedError(
        absl::StrCat(caller_, ": rank ", piece.owner, " has no '", piece.parameter, "' to save"));
  }
  return absl::MakeConstSpan(values_).first(world.rank() == 0 ? size : 0);
}

absl::Status PieceReader::Read(const TensorPiece& piece) {
  const Parameter* const parameter = store_.Find(piece.parameter);
  const auto is_cut = [](const Parameter& p) {
    for (size_t i = 0; i < p.parts().size(); ++i) {
      if (p.box(i).size() != p.parts()[i].size()) return true;
    }
    return false;
  };
  if (parameter != nullptr && is_cut(*parameter)) {
    return absl::UnimplementedError(
        absl::StrCat(caller_, ": parameter '", piece.parameter,
                     "' is cut among tensor-parallel ranks, expected whole ones: a checkpoint that "
                     "was written at any layout is exported by moe ckpt export"));
  }
  const int64_t size = ShapeOf(piece.rule->parameter, config_).size();
  if (parameter == nullptr || parameter->size() != size) {
    return absl::InvalidArgumentError(
        absl::StrCat(caller_, ": parameter '", piece.parameter, "' ",
                     parameter == nullptr ? "is not in the store"
                                          : absl::StrCat("has ", parameter->size(), " elements"),
                     ", expected it with ", size));
  }
  MOE_ASSIGN_OR_RETURN(const std::vector<float> whole, read_(*parameter));
  ForEachElement(*piece.rule, config_,
                 [&](int64_t i, int64_t j) { values_[static_cast<size_t>(j)] = whole[i]; });
  return absl::OkStatus();
}

}  // namespace moe::hf
