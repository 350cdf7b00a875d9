#include "moe/tensor/linear.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "comm/tree_reduce_scatter.h"
#include "kernels/base/status_macros.h"
#include "kernels/bias/bias.h"
#include "kernels/grouped_gemm/gemm_problem.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "moe/run/deferred_gradients.h"
#include "moe/tensor/own_rows.h"

namespace moe {
namespace {

ParameterSpec BiasOf(const ParameterSpec& weight, const TensorShare& share) {
  const auto named = [](const std::string& name) {
    return absl::StrCat(absl::StripSuffix(name, "weight"), "bias");
  };
  ParameterSpec bias = {.name = named(weight.name),
                        .cols = weight.rows,
                        .holders = weight.holders,
                        .initializer = Initializer::kZeros,
                        .weight_decay = false,
                        .trainable = weight.trainable};
  for (const CanonicalTensor& part : weight.parts) {  // cut like the rows that the bias is added to
    const bool cut = part.axis == TensorAxis::kRows;
    if (!cut && bias.holders == MeshGroup::kData) bias.holders = MeshGroup::kStage;
    if (!cut && share.group == MeshGroup::kExpertTensor && share.cut()) {
      bias.holders = MeshGroup::kExpertHolders;
    }
    bias.parts.push_back({.name = named(part.name),
                          .cols = part.rows,
                          .axis = cut ? TensorAxis::kColumns : TensorAxis::kNone,
                          .item = cut ? part.item : 1});
  }
  return bias;
}

// Current values of weights (ParameterStore::Adopt moves them): all of each, or the rows of one of
// its parts().
template <typename T>
absl::StatusOr<absl::Span<const MatrixView<const T>>> ValuesOf(absl::Span<Parameter* const> weights,
                                                               Workspace& workspace,
                                                               std::optional<size_t> part = {}) {
  MOE_ASSIGN_OR_RETURN(const auto out, workspace.Array<MatrixView<const T>>(std::ssize(weights)));
  for (size_t i = 0; i < weights.size(); ++i) {
    out[i] = part ? weights[i]->template part<T>(*part) : weights[i]->template view<T>();
  }
  return out;
}

absl::Span<Parameter* const> Of(const LinearRows& rows, const std::vector<Parameter*>& all) {
  return absl::MakeConstSpan(all).subspan(rows.first, rows.last - rows.first);
}

// Whether segments of `rows` rows are known to the host to be empty.
bool HasNoRows(const GroupOffsets& segments, int64_t rows) {
  return rows == 0 ||
         (segments.known_to_host() && segments.host().front() == segments.host().back());
}

}  // namespace

GemmTree TreeOf(absl::Span<const CanonicalTensor> parts, TensorAxis reduced, int leaves) {
  if (parts.empty() || parts.front().axis != reduced) return {};
  const CanonicalTensor& last = parts.back();
  if (reduced == TensorAxis::kColumns) return {{leaves, last.cols, last.item}};
  return {{leaves, last.rows, last.item},
          static_cast<int>(parts.size()),
          parts.front().rows / last.rows};
}

template <typename T>
absl::StatusOr<Linear<T>> Linear<T>::Create(const LinearSpec& spec, ParameterStore& store) {
  Linear linear;
  linear.share_ = spec.share;
  std::vector<ParameterSpec> weights, biases;
  for (const ParameterSpec& whole : spec.weights) {
    if constexpr (sizeof(T) == 2) MOE_RETURN_IF_ERROR(CheckHalfParts(whole, spec.share));
    MOE_ASSIGN_OR_RETURN(weights.emplace_back(), HeldPart(whole, spec.share));
    if (!spec.biases) continue;
    MOE_ASSIGN_OR_RETURN(biases.emplace_back(), HeldPart(BiasOf(whole, spec.share), spec.share));
  }
  MOE_ASSIGN_OR_RETURN(linear.weights_, store.AddSlab(weights));
  MOE_ASSIGN_OR_RETURN(linear.biases_, store.AddSlab(biases));
  if (!linear.weights_.empty()) linear.cut_as_ = linear.weights_.front()->spec().parts;
  if (spec.pack) linear.packed_.resize(linear.weights_.size());
  return linear;
}

template <typename T>
absl::StatusOr<Linear<T>> Linear<T>::Tied(Parameter& weight, const CanonicalTensor& cut_as,
                                          bool pack) {
  Linear linear;
  linear.weights_ = {&weight};
  linear.cut_as_ = {cut_as};
  linear.tied_ = true;
  if (pack) linear.packed_.resize(1);
  return linear;
}

template <typename T>
absl::StatusOr<int64_t> Linear<T>::PackChanged(const Context& context) const {
  int64_t version = 0;  // sum over all weights: grows when the version of one does
  for (const Parameter* weight : weights_) version += weight->version();
  const GemmTree tree = TreeOf(cut_as_, TensorAxis::kColumns, context.tensor_leaves);
  for (size_t l = 0; l < packed_.size(); ++l) {
    PackedWeights<T>& packed = packed_[l];
    if (packed.version() == version) continue;
    const MatrixView<const T> weight = weights_[l]->template view<T>();
    if (packed.version() == PackedWeights<T>::kNeverPacked) {
      MOE_ASSIGN_OR_RETURN(packed, PackedWeights<T>::Create(weight.rows(), weight.cols(),
                                                            context.gemm.bfloat16_order, tree));
    }
    MOE_RETURN_IF_ERROR(packed.Pack(weight, version, *context.compute));
  }
  return version;
}

template <typename T>
int64_t Linear<T>::packed_bytes() const {
  int64_t bytes = 0;
  for (const PackedWeights<T>& packed : packed_) bytes += packed.bytes();
  return bytes;
}

template <typename T>
template <typename TOut>
absl::Status Linear<T>::Forward(const Context& context, const LinearRows& rows,
                                MatrixView<const T> x, MatrixView<TOut> y) const {
  const WorkspaceScope scope(*context.host_workspace);
  const int64_t all[] = {0, y.rows()};
  const bool grouped = rows.offsets.size() > 0, shared = SharesSum(TensorAxis::kColumns);
  if constexpr (std::is_same_v<T, TOut>) {
    if (shared) {
      MOE_RETURN_IF_ERROR(SumOverRanks(context, TensorAxis::kColumns, rows, x, y));
    } else if (grouped) {
      MOE_RETURN_IF_ERROR(GroupedProduct(context, rows, x, y));
    }
  }
  MOE_CHECK(((!grouped && !shared) || std::is_same_v<T, TOut>));
  if (!grouped && !shared) MOE_RETURN_IF_ERROR(OneProduct(context, rows.first, x, y));
  if (biases_.empty()) return absl::OkStatus();
  Workspace& host = *context.host_workspace;
  const auto mine = Of(rows, biases_);
  MOE_ASSIGN_OR_RETURN(const auto biases, host.Array<absl::Span<const float>>(std::ssize(mine)));
  for (size_t i = 0; i < mine.size(); ++i) biases[i] = mine[i]->vector();
  GroupOffsets offsets = grouped ? rows.offsets : GroupOffsets(all);
  if (shared && rows.gathered != nullptr) {
    MOE_ASSIGN_OR_RETURN(offsets, rows.gathered->OwnOffsets(rows.first, rows.last, host));
  }
  return AddBias<TOut>(y, offsets, biases, *context.compute);
}

template <typename T>
template <typename TOut>
absl::Status Linear<T>::OneProduct(const Context& context, int weight, MatrixView<const T> x,
                                   MatrixView<TOut> y) const {
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const GemmTree tree = TreeOf(cut_as_, TensorAxis::kColumns, context.tensor_leaves);
  if (packed_.empty()) {
    return Gemm<T, TOut>(x, weights_[weight]->template view<T>(), y, workspace, stream,
                         context.gemm, tree);
  }
  MOE_ASSIGN_OR_RETURN(const int64_t version, PackChanged(context));
  return Gemm<T, TOut>(x, packed_[weight], version, y, workspace, stream, tree);
}

template <typename T>
absl::Status Linear<T>::SumOverRanks(const Context& context, TensorAxis reduced,
                                     const LinearRows& rows, MatrixView<const T> x,
                                     MatrixView<T> y) const {
  if (x.rows() == 0) return absl::OkStatus();
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const WorkspaceScope scope(workspace), host_scope(*context.host_workspace);
  const GemmTree whole = TreeOf(cut_as_, reduced, share_.leaves);
  const TreeNode held = LeavesOf(share_.index, share_.ranks, share_.leaves);
  const TreeNodes nodes = NodesOf(whole.cut, share_.index, share_.ranks);
  const auto count = static_cast<int64_t>(nodes.size()), cols = y.cols();
  MOE_ASSIGN_OR_RETURN(const auto sums, workspace.Matrix<float>(x.rows(), count * cols));
  const int64_t one[] = {0, x.rows()};
  const GroupOffsets offsets = rows.offsets.size() > 0 ? rows.offsets : GroupOffsets(one);
  MOE_ASSIGN_OR_RETURN(const auto weights,
                       ValuesOf<T>(Of(rows, weights_), *context.host_workspace));
  for (int64_t j = 0; j < count; ++j) {
    const GemmTree tree = {whole.cut.PartOf(held, nodes[j]), whole.parts, whole.first_times};
    const MatrixView<float> node = ColumnRange(sums, j * cols, (j + 1) * cols);
    MOE_RETURN_IF_ERROR(
        reduced == TensorAxis::kColumns
            ? (GroupedGemm<T, float>(x, offsets, weights, node, workspace, stream, context.gemm,
                                     tree))
            : (GroupedGemmInputGradient<T, float>(x, offsets, weights, node, workspace, stream,
                                                  context.gemm, tree)));
  }
  if (rows.gathered != nullptr) {
    return rows.gathered->Sum<T>(context, rows.first, rows.last, whole.cut, sums, y, rows.site);
  }
  const RankCounts even = share_.RowsOf(x.rows());
  const TreeScatter<T> scatter = {
      .cut = whole.cut, .row_offsets = rows.own.empty() ? even : rows.own, .nodes = sums, .out = y};
  return TensorExchange(context, rows.site.Named("tensor sum"),
                        [&](Communicator& group, const Site& at) {
                          return TreeReduceScatter<T>(scatter, group, workspace, stream, at);
                        });
}

template <typename T>
absl::Status Linear<T>::GroupedProduct(const Context& context, const LinearRows& rows,
                                       MatrixView<const T> x, MatrixView<T> y) const {
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const GemmTree tree = TreeOf(cut_as_, TensorAxis::kColumns, context.tensor_leaves);
  if (!packed_.empty()) {
    MOE_ASSIGN_OR_RETURN(const int64_t version, PackChanged(context));
    const auto mine = absl::MakeConstSpan(packed_).subspan(rows.first, rows.last - rows.first);
    return GroupedGemm<T>(x, rows.offsets.host(), mine, version, y, workspace, stream, tree);
  }
  const auto weights = Of(rows, weights_);
  const auto product = [&](std::optional<size_t> part, MatrixView<T> columns) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto values, ValuesOf<T>(weights, *context.host_workspace, part));
    return GroupedGemm<T>(x, rows.offsets, values, columns, workspace, stream, context.gemm, tree);
  };
  if (std::all_of(weights.begin(), weights.end(), [](auto* w) { return w->contiguous(); })) {
    return product(std::nullopt, y);
  }
  // Columns of y are independent chains, so products of parts have the bits of the whole product.
  int64_t begin = 0;
  for (size_t i = 0; i < cut_as_.size(); ++i) {
    const int64_t end = begin + weights.front()->box(i).rows();
    MOE_RETURN_IF_ERROR(product(i, ColumnRange(y, begin, end)));
    begin = end;
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Linear<T>::InputGradient(const Context& context, const LinearRows& rows,
                                      MatrixView<const T> dy, MatrixView<T> dx) const {
  if (SharesSum(TensorAxis::kRows)) {
    return SumOverRanks(context, TensorAxis::kRows, rows, dy, dx);
  }
  const GemmTree tree = TreeOf(cut_as_, TensorAxis::kRows, context.tensor_leaves);
  if (rows.offsets.size() == 0) {
    return GemmInputGradient<T>(dy, weights_[rows.first]->template view<T>(), dx,
                                *context.workspace, *context.compute, context.gemm, tree);
  }
  const WorkspaceScope scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto weights,
                       ValuesOf<T>(Of(rows, weights_), *context.host_workspace));
  return GroupedGemmInputGradient<T>(dy, rows.offsets, weights, dx, *context.workspace,
                                     *context.compute, context.gemm, tree);
}

template <typename T>
absl::Status Linear<T>::WeightGradient(const Context& context, const LinearRows& rows,
                                       MatrixView<const T> dy, MatrixView<const T> x,
                                       GradientReady ready) const {
  const auto weights = Of(rows, weights_);
  if (weights.empty() || !weights.front()->spec().trainable) return absl::OkStatus();
  if (context.later != nullptr) return Defer(context, rows, dy, x);
  const int64_t all[] = {0, dy.rows()};
  const GroupOffsets segments = rows.segments.size() > 0 ? rows.segments : GroupOffsets(all);
  // Buckets hold a module's last parameters first, but those of a slab first to last: biases come
  // first, then weights, bucket by bucket, so that at most two buckets are open.
  const bool behind_sum = !cut_as_.empty() && cut_as_.front().axis == TensorAxis::kColumns;
  const bool of_experts = weights.front()->spec().holders != MeshGroup::kData;
  if (!biases_.empty() && behind_sum && !of_experts) {  // each rank has its own rows
    const OwnRows own = OwnRowsOf(context, dy.rows());
    MOE_RETURN_IF_ERROR(
        AddBiasGradients(context, biases_, GroupOffsets(own.segments), own.Of(dy), ready));
  } else if (behind_sum && share_.cut() && share_.index > 0) {  // the first rank adds all rows
    for (Parameter* const bias : Of(rows, biases_)) MOE_RETURN_IF_ERROR(ready(*bias));
  } else if (!biases_.empty()) {
    MOE_RETURN_IF_ERROR(AddBiasGradients(context, Of(rows, biases_), segments, dy, ready));
  }
  const size_t each = (segments.size() - 1) / weights.size();
  for (size_t first = 0, last; first < weights.size(); first = last) {
    last = first + 1;
    while (last < weights.size() &&
           weights[last]->round_bucket() == weights[first]->round_bucket()) {
      ++last;
    }
    const auto run = weights.subspan(first, last - first);
    MOE_RETURN_IF_ERROR(
        AddRun(context, run, segments.subspan(first * each, run.size() * each + 1), dy, x));
    if (tied_) continue;
    for (Parameter* const weight : run) MOE_RETURN_IF_ERROR(ready(*weight));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Linear<T>::Defer(const Context& context, LinearRows rows, MatrixView<const T> dy,
                              MatrixView<const T> x) const {
  DeferredGradients& later = *context.later;
  MOE_ASSIGN_OR_RETURN(dy, later.Keep(dy));
  MOE_ASSIGN_OR_RETURN(x, later.Keep(x));
  MOE_ASSIGN_OR_RETURN(rows.segments, later.Keep(rows.segments));
  rows.offsets = {};
  Context now = context;
  now.later = nullptr;
  later.Add([this, now, rows, dy, x] {
    return WeightGradient(now, rows, dy, x, [](Parameter&) { return absl::OkStatus(); });
  });
  return absl::OkStatus();
}

template <typename T>
absl::Status Linear<T>::AddRun(const Context& context, absl::Span<Parameter* const> weights,
                               const GroupOffsets& segments, MatrixView<const T> dy,
                               MatrixView<const T> x) {
  if (HasNoRows(segments, dy.rows())) return absl::OkStatus();
  const WorkspaceScope scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto sums,
                       context.host_workspace->Array<GradAccumulator>(std::ssize(weights)));
  for (size_t i = 0; i < weights.size(); ++i) {
    MOE_ASSIGN_OR_RETURN(sums[i], weights[i]->OpenGradient());
  }
  return AddWeightGradients<T>(dy, x, segments, sums, *context.workspace, *context.compute,
                               context.gemm);
}

template <typename T>
absl::Status Linear<T>::AddBiasGradients(const Context& context,
                                         absl::Span<Parameter* const> biases,
                                         const GroupOffsets& segments, MatrixView<const T> dy,
                                         GradientReady ready) {
  const size_t each = (segments.size() - 1) / biases.size();
  const size_t step = context.numerics == Numerics::kFast ? each : 1;
  for (size_t i = 0; i < biases.size(); ++i) {
    for (size_t s = i * each; s < (i + 1) * each; s += step) {
      const GroupOffsets rows = segments.subspan(s, step + 1);
      if (HasNoRows(rows, dy.rows())) continue;
      MOE_ASSIGN_OR_RETURN(const GradAccumulator sum, biases[i]->OpenGradient());
      MOE_RETURN_IF_ERROR(sum.Add(
          [&](absl::Span<float> out, Write write) {
            return BiasGradient<T>(dy, rows, out, write, *context.compute);
          },
          *context.workspace, *context.compute));
    }
    MOE_RETURN_IF_ERROR(ready(*biases[i]));
  }
  return absl::OkStatus();
}

template class Linear<float>;
template class Linear<BFloat16>;
template class Linear<Float16>;
#define MOE_INSTANTIATE(T, TOut)                                                                   \
  template absl::Status Linear<T>::Forward(const Context&, const LinearRows&, MatrixView<const T>, \
                                           MatrixView<TOut>) const;
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
