#include "moe/layer/experts.h"

#include <algorithm>
#include <iterator>
#include <optional>

#include <absl/strings/str_cat.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"
#include "kernels/bias/bias.h"
#include "kernels/grouped_gemm/gemm_cublas.h"
#include "kernels/grouped_gemm/grouped_gemm.h"
#include "kernels/grouped_gemm/weight_gradient.h"
#include "moe/tensor/linear.h"

namespace moe {
namespace {

// The rows [begin, end) of some groups, and their offsets counted from the first of them.
struct RowsOfGroups {
  int64_t begin, end;
  GroupOffsets offsets;
};
// Of groups [first, last); of all `rows`, where a device knows the offsets alone.
absl::StatusOr<RowsOfGroups> RowsOf(const GroupOffsets& offsets, int first, int last, int64_t rows,
                                    Workspace& workspace) {
  if (!offsets.known_to_host()) return RowsOfGroups{0, rows, offsets};
  const auto all = offsets.host();
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> out, workspace.Array<int64_t>(last - first + 1));
  for (int g = first; g <= last; ++g) out[g - first] = all[g] - all[first];
  return RowsOfGroups{all[first], all[last], out};
}

// Where the values of parameters are now: ParameterStore::Adopt moves them. `part`: of each, this
// one of its parts(); nothing: all.
template <typename T>
absl::StatusOr<absl::Span<const MatrixView<const T>>> Weights(
    absl::Span<Parameter* const> parameters, Workspace& workspace,
    std::optional<size_t> part = {}) {
  MOE_ASSIGN_OR_RETURN(const auto out,
                       workspace.Array<MatrixView<const T>>(std::ssize(parameters)));
  for (size_t i = 0; i < parameters.size(); ++i) {
    out[i] = part ? parameters[i]->template part<T>(*part) : parameters[i]->template view<T>();
  }
  return out;
}
absl::StatusOr<absl::Span<const absl::Span<const float>>> Biases(
    absl::Span<Parameter* const> parameters, Workspace& workspace) {
  MOE_ASSIGN_OR_RETURN(const auto out,
                       workspace.Array<absl::Span<const float>>(std::ssize(parameters)));
  for (size_t i = 0; i < parameters.size(); ++i) out[i] = parameters[i]->vector();
  return out;
}

// What is added to the rows of a projection.
ParameterSpec BiasOf(const ParameterSpec& weight) {
  const auto named = [](const std::string& name) {
    return absl::StrCat(absl::StripSuffix(name, "weight"), "bias");
  };
  ParameterSpec bias = {.name = named(weight.name),
                        .cols = weight.rows,
                        .holders = weight.holders,
                        .initializer = Initializer::kZeros,
                        .weight_decay = false,
                        .trainable = weight.trainable};
  for (const CanonicalTensor& part : weight.parts) {  // cut with the rows that it is added to
    const bool cut = part.axis == TensorAxis::kRows;
    if (!cut && bias.holders == MeshGroup::kData) bias.holders = MeshGroup::kStage;
    bias.parts.push_back({.name = named(part.name),
                          .cols = part.rows,
                          .axis = cut ? TensorAxis::kColumns : TensorAxis::kNone,
                          .item = cut ? part.item : 1});
  }
  return bias;
}

}  // namespace

template <typename T>
absl::StatusOr<std::unique_ptr<Experts<T>>> Experts<T>::Create(
    const ExpertsConfig& config, absl::Span<const std::string> prefixes, MeshGroup holders,
    ParameterStore& store) {
  if (config.hidden_size < 1 || config.ffn_hidden_size < 1) {
    return absl::InvalidArgumentError(absl::StrCat("Experts: hidden_size ", config.hidden_size,
                                                   ", ffn_hidden_size ", config.ffn_hidden_size,
                                                   ", expected both >= 1"));
  }
  const bool gated = IsGated(config.activation);
  const int64_t hidden = config.hidden_size, width = config.ffn_hidden_size;
  auto experts = std::unique_ptr<Experts>(new Experts(config));
  const bool borrowable = !config.pack_weights;  // once frozen
  std::vector<ParameterSpec> gate_up, down;
  for (const std::string& prefix : prefixes) {
    const auto part = [&](const char* name) -> CanonicalTensor {
      return {.name = absl::StrCat(prefix, name),
              .rows = width,
              .cols = hidden,
              .axis = TensorAxis::kRows,
              .item = kCutItem};
    };
    std::vector<CanonicalTensor> up = {part("up_proj.weight")};
    if (gated) up.insert(up.begin(), part("gate_proj.weight"));
    gate_up.push_back({.name = prefix + (gated ? "gate_up_proj.weight" : "up_proj.weight"),
                       .rows = width * (gated ? 2 : 1),
                       .cols = hidden,
                       .holders = holders,
                       .init_std = config.init_std,
                       .trainable = config.train,
                       .borrowable = borrowable,
                       .parts = std::move(up)});
    down.push_back(CutAlong(TensorAxis::kColumns, {.name = prefix + "down_proj.weight",
                                                   .rows = hidden,
                                                   .cols = width,
                                                   .holders = holders,
                                                   .init_std = config.down_init_std,
                                                   .trainable = config.train,
                                                   .borrowable = borrowable}));
  }
  MOE_RETURN_IF_ERROR(experts->AddProjection(gate_up, experts->gate_up_, store));
  MOE_RETURN_IF_ERROR(experts->AddProjection(down, experts->down_, store));
  return experts;
}

template <typename T>
absl::Status Experts<T>::AddProjection(absl::Span<const ParameterSpec> weights,
                                       Projection& projection, ParameterStore& store) {
  const auto add = [&](absl::Span<const ParameterSpec> specs,
                       std::vector<Parameter*>& parameters) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(parameters, store.AddSlab(specs));
    all_.insert(all_.end(), parameters.begin(), parameters.end());
    return absl::OkStatus();
  };
  MOE_RETURN_IF_ERROR(add(weights, projection.weight));
  for (const ParameterSpec& weight : weights) {
    if (!config_.pack_weights) break;
    MOE_ASSIGN_OR_RETURN(projection.packed.emplace_back(),
                         PackedWeights<T>::Create(weight.rows, weight.cols));
  }
  if (!config_.biases) return absl::OkStatus();
  std::vector<ParameterSpec> biases;
  for (const ParameterSpec& weight : weights) biases.push_back(BiasOf(weight));
  return add(biases, projection.bias);
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
absl::Status Experts<T>::Forward(int first, int last, const GroupOffsets& offsets,
                                 ExpertsSaved<T>& saved, MatrixView<T> out,
                                 const Context& context) const {
  const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto mine,
                       RowsOf(offsets, first, last, saved.rows.rows(), *context.host_workspace));
  const auto& [begin, end, local] = mine;
  if (begin == end) return absl::OkStatus();
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  const auto hidden = RowRange(saved.hidden, begin, end);
  MOE_RETURN_IF_ERROR(
      Project(gate_up_, first, local, RowRange(saved.rows, begin, end), gate_up, {}, context));
  MOE_RETURN_IF_ERROR(ActivationForward<T>(config_.activation,
                                           ColumnRange(gate_up, 0, config_.ffn_hidden_size),
                                           UpColumns(gate_up), hidden, *context.compute));
  return Project(down_, first, local, hidden, RowRange(out, begin, end),
                 TreeOf(down_.weight.front()->parts(), TensorAxis::kColumns, context.tensor_leaves),
                 context);
}

template <typename T>
int64_t Experts<T>::packed_bytes() const {
  int64_t bytes = 0;
  for (const Projection* projection : {&gate_up_, &down_}) {
    for (const PackedWeights<T>& packed : projection->packed) bytes += packed.bytes();
  }
  return bytes;
}

template <typename T>
absl::StatusOr<int64_t> Experts<T>::PackChanged(const Projection& projection,
                                                Stream& stream) const {
  int64_t version = 0;  // of all weights: grows when one of theirs does
  for (const Parameter* weight : projection.weight) version += weight->version();
  for (size_t l = 0; l < projection.packed.size(); ++l) {
    if (projection.packed[l].version() == version) continue;
    MOE_RETURN_IF_ERROR(
        projection.packed[l].Pack(projection.weight[l]->template view<T>(), version, stream));
  }
  return version;
}

// Columns of y are chains of their own, so products of parts have the bits of the whole one's.
template <typename T>
absl::Status Experts<T>::ProjectInPlace(absl::Span<Parameter* const> weight,
                                        const GroupOffsets& offsets, MatrixView<const T> x,
                                        MatrixView<T> y, const GemmTree& tree,
                                        const Context& context) {
  const auto gemm = [&](std::optional<size_t> part, MatrixView<T> columns) -> absl::Status {
    MOE_ASSIGN_OR_RETURN(const auto weights, Weights<T>(weight, *context.host_workspace, part));
    return GroupedGemm<T>(x, offsets, weights, columns, *context.workspace, *context.compute,
                          context.gemm, tree);
  };
  if (std::all_of(weight.begin(), weight.end(), [](auto* p) { return p->contiguous(); })) {
    return gemm(std::nullopt, y);
  }
  int64_t begin = 0;
  for (size_t i = 0; i < weight.front()->parts().size(); ++i) {
    const int64_t end = begin + weight.front()->parts()[i].rows;
    MOE_RETURN_IF_ERROR(gemm(i, ColumnRange(y, begin, end)));
    begin = end;
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Experts<T>::Project(const Projection& projection, int first,
                                 const GroupOffsets& offsets, MatrixView<const T> x,
                                 MatrixView<T> y, const GemmTree& tree,
                                 const Context& context) const {
  const size_t count = offsets.size() - 1;
  Workspace& host = *context.host_workspace;
  const WorkspaceScope scope(host);
  const auto mine = [&](const std::vector<Parameter*>& all) {
    return absl::MakeConstSpan(all).subspan(first, count);
  };
  if (config_.pack_weights) {
    MOE_ASSIGN_OR_RETURN(const int64_t version, PackChanged(projection, *context.compute));
    MOE_RETURN_IF_ERROR(GroupedGemm<T>(x, offsets.host(),
                                       absl::MakeConstSpan(projection.packed).subspan(first, count),
                                       version, y, *context.workspace, *context.compute, tree));
  } else {
    MOE_RETURN_IF_ERROR(ProjectInPlace(mine(projection.weight), offsets, x, y, tree, context));
  }
  if (projection.bias.empty()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(const auto biases, Biases(mine(projection.bias), host));
  return AddBias<T>(y, offsets, biases, *context.compute);
}

template <typename T>
absl::Status Experts<T>::AddGradients(const Projection& projection, int first, int last,
                                      const GroupOffsets& segments, MatrixView<const T> dy,
                                      MatrixView<const T> x, const Context& context) const {
  if (!config_.train) return absl::OkStatus();
  const WorkspaceScope scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto grads,
                       context.host_workspace->Array<GradAccumulator>(last - first));
  for (int l = first; l < last; ++l) grads[l - first] = projection.weight[l]->grad();
  MOE_RETURN_IF_ERROR(AddWeightGradients<T>(dy, x, segments, grads, *context.workspace,
                                            *context.compute, context.gemm));
  if (projection.bias.empty()) return absl::OkStatus();
  const int64_t each = (static_cast<int64_t>(segments.size()) - 1) / (last - first);
  const int64_t step = context.numerics == Numerics::kFast ? each : 1;
  for (int64_t s = 0; s < each * (last - first); s += step) {
    const GroupOffsets rows = segments.subspan(s, step + 1);
    if (rows.known_to_host() && rows.host().front() == rows.host().back()) continue;
    MOE_RETURN_IF_ERROR(projection.bias[first + s / each]->grad().Add(
        [&](absl::Span<float> out, Write write) {
          return BiasGradient<T>(dy, rows, out, write, *context.compute);
        },
        *context.workspace, *context.compute));
  }
  return absl::OkStatus();
}

template <typename T>
absl::Status Experts<T>::Backward(int first, int last, const GroupOffsets& offsets,
                                  const GroupOffsets& segment_offsets, int64_t segments,
                                  ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                                  MatrixView<T> d_rows, const Context& context) const {
  Workspace& workspace = *context.workspace;
  Stream& stream = *context.compute;
  const WorkspaceScope scope(workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto rows,
                       RowsOf(offsets, first, last, saved.rows.rows(), *context.host_workspace));
  const auto& [begin, end, local] = rows;
  if (begin == end) return absl::OkStatus();
  const auto weights = [&](const Projection& projection) {
    return Weights<T>(absl::MakeConstSpan(projection.weight).subspan(first, last - first),
                      *context.host_workspace);
  };
  GroupOffsets mine;
  if (config_.train) {
    mine = segment_offsets.subspan(first * segments, (last - first) * segments + 1);
    if (!mine.known_to_host()) {
      MOE_ASSIGN_OR_RETURN(const bool by_cublas,
                           TakesCublas<T>("Experts::Backward", context.gemm, 1, end - begin));
      if (by_cublas) {
        MOE_ASSIGN_OR_RETURN(const auto host, OnHost(mine.device(), context));
        mine = GroupOffsets::OnDevice(mine.device(), host);
      }
    }
  }

  MOE_RETURN_IF_ERROR(AddGradients(down_, first, last, mine, d_out, saved.hidden, context));
  MOE_ASSIGN_OR_RETURN(const auto d_hidden,
                       workspace.Matrix<T>(end - begin, config_.ffn_hidden_size));
  MOE_ASSIGN_OR_RETURN(const auto down, weights(down_));
  MOE_RETURN_IF_ERROR(GroupedGemmInputGradient<T>(RowRange(d_out, begin, end), local, down,
                                                  d_hidden, workspace, stream, context.gemm));
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  const auto gate = ColumnRange(gate_up, 0, config_.ffn_hidden_size);
  const auto up = UpColumns(gate_up);
  MOE_RETURN_IF_ERROR(
      ActivationBackward<T>(config_.activation, gate, up, d_hidden, gate, up, stream));
  MOE_RETURN_IF_ERROR(
      AddGradients(gate_up_, first, last, mine, saved.gate_up, saved.rows, context));
  MOE_ASSIGN_OR_RETURN(const auto gate_up_weights, weights(gate_up_));
  return GroupedGemmInputGradient<T>(
      gate_up, local, gate_up_weights, RowRange(d_rows, begin, end), workspace, stream,
      context.gemm,
      TreeOf(gate_up_.weight.front()->parts(), TensorAxis::kRows, context.tensor_leaves));
}

template class Experts<float>;
template class Experts<BFloat16>;
template class Experts<Float16>;

}  // namespace moe
