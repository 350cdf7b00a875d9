#include "moe/experts.h"

#include <numeric>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/grouped_gemm.h"

namespace moe {
namespace {

// Offsets of groups [first, last), counted from the first of them.
absl::StatusOr<absl::Span<const int64_t>> Rebase(absl::Span<const int64_t> offsets, int first,
                                                 int last, Workspace& workspace) {
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> out, workspace.Array<int64_t>(last - first + 1));
  for (int g = first; g <= last; ++g) out[g - first] = offsets[g] - offsets[first];
  return out;
}

template <typename T>
void CollectViews(absl::Span<Parameter* const> parameters,
                  std::vector<MatrixView<const T>>& views) {
  for (const Parameter* p : parameters) views.push_back(p->view<T>());
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Experts<T>>> Experts<T>::Create(
    const ExpertsConfig& config, absl::Span<const std::string> prefixes, ParameterGroup group,
    ParameterStore& store) {
  if (config.hidden_size < 1 || config.ffn_hidden_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("Experts: hidden_size ", config.hidden_size,
                                                   ", ffn_hidden_size ", config.ffn_hidden_size,
                                                   ", expected both >= 1"));
  }
  const bool gated = IsGated(config.activation);
  auto experts = std::unique_ptr<Experts>(new Experts(config));
  for (const std::string& prefix : prefixes) {
    MOE_ASSIGN_OR_RETURN(
        Parameter* const up,
        store.Add({.name = prefix + (gated ? "gate_up_proj.weight" : "up_proj.weight"),
                   .rows = config.ffn_hidden_size * (gated ? 2 : 1),
                   .cols = config.hidden_size,
                   .group = group,
                   .init_std = config.init_std}));
    MOE_ASSIGN_OR_RETURN(Parameter* const down, store.Add({.name = prefix + "down_proj.weight",
                                                           .rows = config.hidden_size,
                                                           .cols = config.ffn_hidden_size,
                                                           .group = group,
                                                           .init_std = config.down_init_std}));
    experts->gate_up_.push_back(up);
    experts->down_.push_back(down);
    experts->all_.push_back(up);
    experts->all_.push_back(down);
  }
  CollectViews<T>(experts->gate_up_, experts->gate_up_views_);
  CollectViews<T>(experts->down_, experts->down_views_);
  return experts;
}

template <typename T>
absl::Status Experts<T>::Prepare(MatrixView<const T> rows, Workspace& workspace,
                                 ExpertsSaved<T>& saved) const {
  const int64_t width = config_.ffn_hidden_size;
  saved.rows = rows;
  MOE_ASSIGN_OR_RETURN(
      saved.gate_up,
      workspace.Matrix<T>(rows.rows(), IsGated(config_.activation) ? 2 * width : width));
  MOE_ASSIGN_OR_RETURN(saved.hidden, workspace.Matrix<T>(rows.rows(), width));
  return absl::OkStatus();
}

template <typename T>
MatrixView<T> Experts<T>::UpColumns(MatrixView<T> gate_up) const {
  if (!IsGated(config_.activation)) return {};
  return ColumnRange(gate_up, config_.ffn_hidden_size, 2 * config_.ffn_hidden_size);
}

template <typename T>
absl::Status Experts<T>::Forward(int first, int last, absl::Span<const int64_t> offsets,
                                 ExpertsSaved<T>& saved, MatrixView<T> out,
                                 const Context& context) const {
  const int64_t begin = offsets[first], end = offsets[last];
  if (begin == end) return absl::OkStatus();
  Workspace& workspace = *context.workspace;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto local, Rebase(offsets, first, last, workspace));
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  const auto hidden = RowRange(saved.hidden, begin, end);
  const auto weights = [&](const std::vector<MatrixView<const T>>& views) {
    return absl::MakeConstSpan(views).subspan(first, last - first);
  };
  MOE_RETURN_IF_ERROR(GroupedGemm<T>(RowRange(saved.rows, begin, end), local,
                                     weights(gate_up_views_), gate_up, workspace,
                                     *context.compute));
  MOE_RETURN_IF_ERROR(ActivationForward<T>(config_.activation,
                                           ColumnRange(gate_up, 0, config_.ffn_hidden_size),
                                           UpColumns(gate_up), hidden, *context.compute));
  return GroupedGemm<T>(hidden, local, weights(down_views_), RowRange(out, begin, end), workspace,
                        *context.compute);
}

template <typename T>
absl::Status Experts<T>::AddWeightGradient(const Parameter& parameter, MatrixView<const T> dy,
                                           MatrixView<const T> x,
                                           absl::Span<const int64_t> segments,
                                           const Context& context) const {
  const auto add = [&](int64_t begin, int64_t end) {
    if (begin == end) return absl::OkStatus();
    return parameter.grad().Add(
        [&](absl::Span<float> out, Write write) {
          return GemmWeightGradient<T>(
              RowRange(dy, begin, end), RowRange(x, begin, end),
              MatrixView<float>(out.data(), parameter.spec().rows, parameter.spec().cols), write,
              *context.workspace, *context.compute);
        },
        *context.workspace, *context.compute);
  };
  if (context.numerics == Numerics::kFast) return add(segments.front(), segments.back());
  for (size_t s = 0; s + 1 < segments.size(); ++s) {
    MOE_RETURN_IF_ERROR(add(segments[s], segments[s + 1]));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Experts<T>::Backward(int first, int last, absl::Span<const int64_t> offsets,
                                  absl::Span<const int64_t> segment_offsets, int64_t segments,
                                  ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                                  MatrixView<T> d_rows, const Context& context) const {
  const int64_t begin = offsets[first], end = offsets[last];
  if (begin == end) return absl::OkStatus();
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const WorkspaceScope scope(workspace);
  MOE_ASSIGN_OR_RETURN(const auto local, Rebase(offsets, first, last, workspace));
  const auto weights = [&](const std::vector<MatrixView<const T>>& views) {
    return absl::MakeConstSpan(views).subspan(first, last - first);
  };
  const auto segments_of = [&](int network) {
    return segment_offsets.subspan(network * segments, segments + 1);
  };

  for (int l = first; l < last; ++l) {
    MOE_RETURN_IF_ERROR(AddWeightGradient(*down_[l], d_out, saved.hidden, segments_of(l), context));
  }
  MOE_ASSIGN_OR_RETURN(const auto d_hidden,
                       workspace.Matrix<T>(end - begin, config_.ffn_hidden_size));
  MOE_RETURN_IF_ERROR(GroupedGemmInputGradient<T>(
      RowRange(d_out, begin, end), local, weights(down_views_), d_hidden, workspace, stream));
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  const auto gate = ColumnRange(gate_up, 0, config_.ffn_hidden_size);
  const auto up = UpColumns(gate_up);
  MOE_RETURN_IF_ERROR(
      ActivationBackward<T>(config_.activation, gate, up, d_hidden, gate, up, stream));
  for (int l = first; l < last; ++l) {
    MOE_RETURN_IF_ERROR(
        AddWeightGradient(*gate_up_[l], saved.gate_up, saved.rows, segments_of(l), context));
  }
  return GroupedGemmInputGradient<T>(gate_up, local, weights(gate_up_views_),
                                     RowRange(d_rows, begin, end), workspace, stream);
}

template class Experts<float>;
template class Experts<BFloat16>;

}  // namespace moe
