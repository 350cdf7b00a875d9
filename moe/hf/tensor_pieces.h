// Assembles tensors of a model on one rank from parameters that several ranks hold.
#ifndef MOE_MOE_HF_TENSOR_PIECES_H_
#define MOE_MOE_HF_TENSOR_PIECES_H_

#include <cstdint>
#include <string>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "dispatch/placement.h"
#include "moe/hf/tensor_rule.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe::hf {

// The range of a tensor that one parameter holds.
struct TensorPiece {
  const TensorRule* rule = nullptr;
  std::string parameter;  // its name in the store
  int owner = 0;          // the rank of the world that sends it
};

// The pieces of a tensor, in order: a stacked one has a piece for each expert, any other one piece
// (numbered: that of `expert`). Parameters' names start with `prefix`.
std::vector<TensorPiece> PiecesOf(const TensorRule& rule, int32_t expert, const std::string& prefix,
                                  const ExpertPlacement& placement);

// Values of a parameter that this rank holds, on the host.
using ReadParameter = absl::FunctionRef<absl::StatusOr<std::vector<float>>(const Parameter&)>;

// Sends pieces to rank 0 of the world, one at a time: every rank requests the same ones, in the
// same order. Arguments are borrowed. Memory: one piece on two ranks.
class PieceReader {
 public:
  // `caller` begins messages.
  PieceReader(const char* caller, const MoeLayerConfig& config, const ParameterStore& store,
              const Context& context, ReadParameter read)
      : caller_(caller), config_(config), store_(store), context_(context), read_(read) {}

  // On rank 0 the values in the order of the tensor, valid until the next call; empty on others.
  // Blocks. On the owner kInvalidArgument, if its store lacks the parameter or has one of another
  // size, and errors of `read`; rank 0 then returns kAborted, and the next piece may follow.
  absl::StatusOr<absl::Span<const float>> Next(const TensorPiece& piece);

 private:
  absl::Status Read(const TensorPiece& piece);

  const char* const caller_;
  const MoeLayerConfig& config_;
  const ParameterStore& store_;
  const Context& context_;
  const ReadParameter read_;
  std::vector<float> values_;
};

}  // namespace moe::hf

#endif  // MOE_MOE_HF_TENSOR_PIECES_H_
