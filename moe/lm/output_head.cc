#include "moe/lm/output_head.h"

#include <type_traits>
#include <utility>

#include "comm/column_exchange.h"
#include "kernels/base/workspace.h"
#include "kernels/cross_entropy/cross_entropy.h"
#include "moe/state/weight_lease.h"

namespace moe::lm {
namespace {

// Memory for the gradient by the logits: the logits' own where the types agree.
template <typename T>
absl::StatusOr<MatrixView<T>> LogitGradientMemory(MatrixView<float> logits, Workspace& workspace) {
  if constexpr (std::is_same_v<T, float>) {
    return logits;
  } else {
    return workspace.Matrix<T>(logits.rows(), logits.cols());
  }
}

}  // namespace

template <typename T>
absl::StatusOr<OutputHead<T>> OutputHead<T>::Create(const TransformerConfig& config,
                                                    Parameter* tied, const TensorShare& share,
                                                    ParameterStore& store) {
  const size_t before = store.parameters().size();
  MOE_ASSIGN_OR_RETURN(const Norm<T> norm, Norm<T>::Create("model.norm.weight", config.hidden_size,
                                                           config.norm_epsilon, store));
  const ParameterSpec weight = CutAlong(TensorAxis::kRows, {.name = "lm_head.weight",
                                                            .rows = config.vocab_size,
                                                            .cols = config.hidden_size,
                                                            .init_std = config.init_std});
  const bool pack = config.moe.pack_weights;
  MOE_ASSIGN_OR_RETURN(
      Linear<T> lm_head,
      tied != nullptr
          ? Linear<T>::Tied(*tied, weight.parts.front(), pack)
          : Linear<T>::Create({.weights = {weight}, .pack = pack, .share = share}, store));
  std::vector<Parameter*> parameters = store.AddedSince(before);
  if (tied != nullptr) parameters.push_back(tied);
  std::vector<int64_t> vocabulary = {0};
  const TreeCut tokens = {share.leaves, config.vocab_size, kCutItem};
  for (int r = 0; r < share.ranks; ++r) {
    vocabulary.push_back(tokens.Begin(LeavesOf(r, share.ranks, share.leaves).last));
  }
  return OutputHead(norm, std::move(lm_head), tied != nullptr,
                    tied != nullptr ? TensorShare() : share, std::move(vocabulary),
                    std::move(parameters));
}

template <typename T>
absl::StatusOr<MatrixView<float>> OutputHead<T>::WholeRows(const Pass& pass, const OwnRows& rows,
                                                           MatrixView<float> logits) const {
  const Context& context = pass.context;
  Workspace& workspace = *context.workspace;
  MOE_ASSIGN_OR_RETURN(const auto whole, workspace.Matrix<float>(rows.count(), vocabulary_.back()));
  MOE_RETURN_IF_ERROR(
      TensorExchange(context, pass.site.Named("logits"), [&](Communicator& group, const Site& at) {
        return ColumnsToRows<float>({rows.offsets, vocabulary_, logits, whole}, group, workspace,
                                    *context.compute, at);
      }));
  return whole;
}

template <typename T>
absl::Status OutputHead<T>::RowLosses(const Pass& pass, const OwnRows& rows,
                                      MatrixView<float> logits, float scale,
                                      const TokenBatch& batch, MatrixView<T> d_logits) const {
  const Context& context = pass.context;
  Stream& stream = *context.compute;
  const auto own = [&](auto span) {
    return span.subspan(static_cast<size_t>(rows.begin()), static_cast<size_t>(rows.count()));
  };
  const auto targets = own(batch.targets);
  const auto losses = own(batch.row_loss);
  if (!share_.cut()) return CrossEntropy<T>(logits, targets, scale, losses, d_logits, stream);
  Workspace& workspace = *context.workspace;
  const bool backward = d_logits.rows() > 0;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto whole, WholeRows(pass, rows, logits));
  MatrixView<T> d_whole;
  if (backward) {
    MOE_ASSIGN_OR_RETURN(d_whole, LogitGradientMemory<T>(whole, workspace));
  }
  MOE_RETURN_IF_ERROR(CrossEntropy<T>(whole, targets, scale, losses, d_whole, stream));
  if (!backward) return absl::OkStatus();
  return TensorExchange(context, pass.site.Named("gradient of the logits"),
                        [&](Communicator& group, const Site& at) {
                          return RowsToColumns<T>({rows.offsets, vocabulary_, d_logits, d_whole},
                                                  group, workspace, stream, at);
                        });
}

template <typename T>
absl::StatusOr<MatrixView<float>> OutputHead<T>::Logits(const Pass& pass, const OwnRows& rows,
                                                        MatrixView<const T> x, Saved& saved) const {
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  MOE_RETURN_IF_ERROR(norm_.Forward(pass.WithoutStash(), x, saved.norm));
  saved.normed = saved.norm.y;
  if (share_.cut()) {
    MOE_ASSIGN_OR_RETURN(saved.normed, AllRows<T>(pass.context, rows, saved.norm.y, pass.site));
  }
  MOE_ASSIGN_OR_RETURN(const auto logits, pass.context.workspace->Matrix<float>(
                                              saved.normed.rows(), lm_head_.out_features()));
  MOE_RETURN_IF_ERROR(lm_head_.Forward(pass.context, {}, saved.normed, logits));
  return logits;
}

template <typename T>
absl::StatusOr<MatrixView<const float>> OutputHead<T>::AllLogits(const Pass& pass,
                                                                 const OwnRows& rows,
                                                                 MatrixView<const T> x) const {
  Saved saved;
  MOE_ASSIGN_OR_RETURN(MatrixView<float> logits, Logits(pass, rows, x, saved));
  if (share_.cut()) {
    MOE_ASSIGN_OR_RETURN(logits, WholeRows(pass, rows, logits));
  }
  return AllRows<float>(pass.context, rows, logits, pass.site);
}

template <typename T>
absl::Status OutputHead<T>::Loss(const Pass& pass, const OwnRows& rows, MatrixView<const T> x,
                                 const TokenBatch& batch) const {
  const WorkspaceScope scope(*pass.context.workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  if (rows.all() == 0) return absl::OkStatus();
  Saved saved;
  MOE_ASSIGN_OR_RETURN(const auto logits, Logits(pass, rows, x, saved));
  return RowLosses(pass, rows, logits, /*scale=*/0, batch, {});
}

template <typename T>
absl::Status OutputHead<T>::LossAndGradient(const Pass& pass, const OwnRows& rows,
                                            MatrixView<const T> x, const TokenBatch& batch,
                                            MatrixView<T> dx, GradientReady ready) const {
  // The gradient by logits is as large as they are: nothing of it is kept for later.
  Context context = pass.context;
  context.later = nullptr;
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const WeightLease lease, WeightLease::Take(pass, parameters_));
  Saved saved;
  if (rows.all() == 0) {
    MOE_RETURN_IF_ERROR(lm_head_.WeightGradient(context, {}, {}, {}, ready));
    return norm_.Backward(pass, saved.norm, {}, dx, dx, Write::kOverwrite, ready);
  }
  MOE_ASSIGN_OR_RETURN(const auto logits, Logits(pass, rows, x, saved));
  MOE_ASSIGN_OR_RETURN(const auto d_logits, LogitGradientMemory<T>(logits, workspace));
  const float scale = pass.d_loss / static_cast<float>(rows.all());
  MOE_RETURN_IF_ERROR(RowLosses(pass, rows, logits, scale, batch, d_logits));
  LinearRows of_weight;
  if (tied_) of_weight.segments = GroupOffsets(rows.segments);
  MOE_RETURN_IF_ERROR(lm_head_.WeightGradient(context, of_weight, d_logits, saved.normed, ready));
  MOE_ASSIGN_OR_RETURN(const auto d_normed, workspace.Matrix<T>(x.rows(), x.cols()));
  MOE_RETURN_IF_ERROR(lm_head_.InputGradient(context, {.site = pass.site, .own = rows.offsets},
                                             d_logits, d_normed));
  return norm_.Backward(pass, saved.norm, rows.segments, d_normed, dx, Write::kOverwrite, ready);
}

template class OutputHead<float>;
template class OutputHead<BFloat16>;
template class OutputHead<Float16>;

}  // namespace moe::lm
