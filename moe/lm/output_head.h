// The end of the model: final normalisation, output layer, loss.
#ifndef MOE_MOE_LM_OUTPUT_HEAD_H_
#define MOE_MOE_LM_OUTPUT_HEAD_H_

#include <cstdint>
#include <utility>
#include <vector>

#include <absl/status/statusor.h>
#include <absl/types/span.h>

#include "moe/lm/dense.h"
#include "moe/lm/transformer_config.h"
#include "moe/tensor/linear.h"
#include "moe/tensor/own_rows.h"

namespace moe::lm {

// Tokens of a round, and the losses in nats of those that predict a target.
struct TokenBatch {
  absl::Span<const int32_t> tokens;   // [T]
  absl::Span<const int32_t> targets;  // [n], n <= T
  absl::Span<float> row_loss;         // [n]
  absl::Span<const int32_t>
      loss_rows;  // [n] tokens that predict them, ascending; not read if n = T
};

// row_loss[t] = cross-entropy of RMSNorm(x_t) W^T against target t, logits and loss in float32.
// Ranks of a tensor group have their own of the n rows that have a target, and write the losses of
// these: `rows` is how n and the batch's arrays are divided, and x and dx are of own rows.
// Parameters: "model.norm.weight" [H], and "lm_head.weight" [V, H] unless it is tied. Without
// tokens, parameters are only marked ready; a tied one receives a partial gradient, and its owner
// marks it ready. Scratch is given back before each call returns.
template <typename T>
class OutputHead {
 public:
  // tied: the embedding [V, H] whose weights this layer has, too; nullptr: weights of its own.
  // share: ranks that share an output layer of its own; a tied one is whole on each.
  static absl::StatusOr<OutputHead> Create(const TransformerConfig& config, Parameter* tied,
                                           const TensorShare& share, ParameterStore& store);

  absl::Span<Parameter* const> parameters() const { return parameters_; }

  // [n, V] from x [own n, H], of V this rank's share, in the context's workspace, as what `saved`
  // then has: scratch, not kept. Of a tied output layer [own n, V].
  struct Saved {
    NormSaved<T> norm;           // of own rows
    MatrixView<const T> normed;  // rows that were multiplied
  };
  absl::StatusOr<MatrixView<float>> Logits(const Pass& pass, const OwnRows& rows,
                                           MatrixView<const T> x, Saved& saved) const;
  // x [own n, H]; `batch` in memory of the context's device, targets in [0, V).
  absl::Status Loss(const Pass& pass, const OwnRows& rows, MatrixView<const T> x,
                    const TokenBatch& batch) const;
  // Loss, and dx overwritten with the gradient by x of pass.d_loss * (mean of row_loss over n).
  absl::Status LossAndGradient(const Pass& pass, const OwnRows& rows, MatrixView<const T> x,
                               const TokenBatch& batch, MatrixView<T> dx,
                               GradientReady ready) const;

  // Logits [N, V] of all N rows on each rank that shares them; x: this rank's own. In memory of the
  // context's workspace.
  absl::StatusOr<MatrixView<const float>> AllLogits(const Pass& pass, const OwnRows& rows,
                                                    MatrixView<const T> x) const;

 private:
  OutputHead(const Norm<T>& norm, Linear<T> lm_head, bool tied, const TensorShare& share,
             std::vector<int64_t> vocabulary, std::vector<Parameter*> parameters)
      : norm_(norm),
        lm_head_(std::move(lm_head)),
        tied_(tied),
        share_(share),
        vocabulary_(std::move(vocabulary)),
        parameters_(std::move(parameters)) {}
  // All columns [own N, V] of this rank's rows, from all rows of its columns, in memory of the
  // workspace: where ranks share the vocabulary each sends the others logits of their rows.
  absl::StatusOr<MatrixView<float>> WholeRows(const Pass& pass, const OwnRows& rows,
                                              MatrixView<float> logits) const;
  // Writes the own rows of batch.row_loss and, unless it is empty, d_logits, as large as the
  // logits, whose memory it may be. Where ranks share the vocabulary each is sent all logits of its
  // own rows, and sends the gradients back: the bits of one rank.
  absl::Status RowLosses(const Pass& pass, const OwnRows& rows, MatrixView<float> logits,
                         float scale, const TokenBatch& batch, MatrixView<T> d_logits) const;

  Norm<T> norm_;
  Linear<T> lm_head_;
  bool tied_;
  TensorShare share_;                   // of the output layer; one rank where it is tied
  std::vector<int64_t> vocabulary_;     // [R + 1] tokens of which each rank has the logits
  std::vector<Parameter*> parameters_;  // parameters of both, with an embedding that is tied
};

}  // namespace moe::lm

#endif  // MOE_MOE_LM_OUTPUT_HEAD_H_
