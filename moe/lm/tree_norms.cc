#include "moe/lm/tree_norms.h"

#include "comm/row_gather.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"

namespace moe::lm {

template <typename T>
TreeNorms<T>::TreeNorms(const TransformerConfig& config, const TensorShare& share)
    : share_(share), cut_({share.leaves, config.key_value_heads(), 1}) {
  const TreeNode held = share_.ItemsOf(config.key_value_heads());
  heads_ = held.last - held.first;
  parts_[0].width =
      config.num_attention_heads / config.key_value_heads() * int64_t{config.head_dim()};
  parts_[1] = {.width = config.head_dim(), .begin = heads_ * parts_[0].width};
  tree_.leaves = share_.leaves;
  nodes_ = {0};
  size_t count = 0;
  for (int r = 0; r < share_.ranks; ++r) {
    for (const TreeNode& node : NodesOf(cut_, r, share_.ranks)) {
      tree_.first_leaf[count++] = node.first;
    }
    nodes_.push_back(static_cast<int64_t>(count));
  }
}

template <typename T>
template <typename Add>
absl::StatusOr<MatrixView<const float>> TreeNorms<T>::Sums(const Pass& pass, int64_t rows,
                                                           Add add) const {
  const Context& context = pass.context;
  MOE_ASSIGN_OR_RETURN(const auto all, context.workspace->Matrix<float>(nodes_.back(), 2 * rows));
  const MatrixView<float> own = RowsOfRank(all, nodes_, share_.index);
  const int64_t before = cut_.Begin(LeavesOf(share_.index, share_.ranks, share_.leaves).first);
  const TreeNodes nodes = NodesOf(cut_, share_.index, share_.ranks);
  for (size_t j = 0; j < nodes.size(); ++j) {
    const TreeNode& node = nodes[j];
    const int64_t begin = cut_.Begin(node.first), end = cut_.Begin(node.last);
    for (size_t part = 0; part < 2; ++part) {
      const int64_t width = parts_[part].width;
      RowTree leaves = {.leaves = node.last - node.first};
      for (int s = 0; s <= leaves.leaves; ++s) {
        leaves.begin[static_cast<size_t>(s)] = (cut_.Begin(node.first + s) - begin) * width;
      }
      float* const sums = own.row(static_cast<int64_t>(j)) + static_cast<int64_t>(part) * rows;
      MOE_RETURN_IF_ERROR(add(part, leaves, (begin - before) * width, (end - before) * width,
                              absl::Span<float>(sums, static_cast<size_t>(rows))));
    }
  }
  if (!share_.cut()) return all;
  MOE_RETURN_IF_ERROR(TensorExchange(
      context, pass.site.Named("tensor norms"), [&](Communicator& group, const Site& at) {
        return AllGatherRows<float>(own, all, nodes_, group, *context.compute, at);
      }));
  return all;
}

template <typename T>
NormColumns TreeNorms<T>::ColumnsOf(size_t part, MatrixView<const float> sums) const {
  const int64_t width = parts_[part].width, rows = sums.cols() / 2;
  const auto at = static_cast<int64_t>(part);
  NormColumns columns = {
      .first = cut_.Begin(LeavesOf(share_.index, share_.ranks, share_.leaves).first) * width,
      .tree = tree_};
  columns.tree.nodes = ColumnRange(sums, at * rows, (at + 1) * rows);
  columns.tree.cols = cut_.extent * width;
  return columns;
}

template <typename T>
absl::Status TreeNorms<T>::Forward(const Pass& pass, const Norms<NormSaved<T>>& norms,
                                   MatrixView<const T> x, MatrixView<T> y) const {
  Stream& stream = *pass.context.compute;
  MOE_ASSIGN_OR_RETURN(const auto squares, Sums(pass, x.rows(),
                                                [&](size_t part, const RowTree& node, int64_t first,
                                                    int64_t end, absl::Span<float> sums) {
                                                  return RmsNormSquares<T>(
                                                      ColumnRange(Of(part, x), first, end), node,
                                                      sums, stream);
                                                }));
  for (size_t part = 0; part < 2; ++part) {
    MOE_RETURN_IF_ERROR(norms.of[part]->Forward(pass, Of(part, x), Of(part, y), *norms.saved[part],
                                                ColumnsOf(part, squares)));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status TreeNorms<T>::Backward(const Pass& pass, const Norms<const NormSaved<T>>& norms,
                                    MatrixView<const T> dy, MatrixView<T> dx,
                                    GradientReady ready) const {
  Stream& stream = *pass.context.compute;
  const WorkspaceScope scope(*pass.context.workspace);
  MOE_ASSIGN_OR_RETURN(const auto dots,
                       Sums(pass, dy.rows(),
                            [&](size_t part, const RowTree& node, int64_t first, int64_t end,
                                absl::Span<float> sums) {
                              const auto weight = norms.of[part]->weight().subspan(
                                  static_cast<size_t>(ColumnsOf(part, {}).first + first),
                                  static_cast<size_t>(end - first));
                              return RmsNormDots<T>(ColumnRange(norms.saved[part]->x, first, end),
                                                    weight, ColumnRange(Of(part, dy), first, end),
                                                    node, sums, stream);
                            }));
  for (size_t part = 0; part < 2; ++part) {
    MOE_RETURN_IF_ERROR(norms.of[part]->ColumnsBackward(
        pass, *norms.saved[part], ColumnsOf(part, dots), Of(part, dy), Of(part, dx), ready));
  }
  return absl::OkStatus();
}

template class TreeNorms<float>;
template class TreeNorms<BFloat16>;
template class TreeNorms<Float16>;

}  // namespace moe::lm
