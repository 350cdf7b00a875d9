#include "moe/layer/experts.h"

#include <utility>
#include <vector>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_cublas.h"

namespace moe {
namespace {

// The rows [begin, end) of some networks, and these networks with offsets counted from `begin`.
struct RowsOfNetworks {
  int64_t begin, end;
  LinearRows rows;

  // Their rows of `out`, which are this rank's own where ranks share the networks.
  template <typename T>
  MatrixView<T> Out(MatrixView<T> out, const TensorShare& share) const {
    if (rows.gathered != nullptr) return rows.gathered->Own(out, rows.first, rows.last);
    return share.cut() ? out : RowRange(out, begin, end);
  }
};
// Rows of `networks`, whose offsets are those of all; all rows where only the device has the
// offsets.
template <typename T>
absl::StatusOr<RowsOfNetworks> RowsOf(const LinearRows& networks, const ExpertsSaved<T>& saved,
                                      Workspace& workspace) {
  const GatheredRows* const gathered = saved.gathered.has_value() ? &*saved.gathered : nullptr;
  const GroupOffsets offsets = gathered != nullptr ? gathered->offsets() : networks.offsets;
  if (!offsets.known_to_host()) return RowsOfNetworks{0, saved.rows.rows(), networks};
  const auto all = offsets.host();
  const int first = networks.first, last = networks.last;
  MOE_ASSIGN_OR_RETURN(const absl::Span<int64_t> out, workspace.Array<int64_t>(last - first + 1));
  for (int g = first; g <= last; ++g) out[g - first] = all[g] - all[first];
  return RowsOfNetworks{all[first],
                        all[last],
                        {.first = first,
                         .last = last,
                         .offsets = out,
                         .site = networks.site,
                         .gathered = gathered,
                         .own = networks.own}};
}

ParameterSpec GateUpSpec(const ExpertsConfig& config, const std::string& prefix,
                         MeshGroup holders) {
  const bool gated = IsGated(config.activation);
  const auto part = [&](const char* name) -> CanonicalTensor {
    return {.name = absl::StrCat(prefix, name),
            .rows = config.ffn_hidden_size,
            .cols = config.hidden_size,
            .axis = TensorAxis::kRows,
            .item = kCutItem};
  };
  std::vector<CanonicalTensor> parts = {part("up_proj.weight")};
  if (gated) parts.insert(parts.begin(), part("gate_proj.weight"));
  return {.name = prefix + (gated ? "gate_up_proj.weight" : "up_proj.weight"),
          .rows = config.ffn_hidden_size * (gated ? 2 : 1),
          .cols = config.hidden_size,
          .holders = holders,
          .init_std = config.init_std,
          .trainable = config.train,
          .borrowable = !config.pack_weights,  // borrowable once frozen
          .parts = std::move(parts)};
}

ParameterSpec DownSpec(const ExpertsConfig& config, const std::string& prefix, MeshGroup holders) {
  return CutAlong(TensorAxis::kColumns, {.name = prefix + "down_proj.weight",
                                         .rows = config.hidden_size,
                                         .cols = config.ffn_hidden_size,
                                         .holders = holders,
                                         .init_std = config.down_init_std,
                                         .trainable = config.train,
                                         .borrowable = !config.pack_weights});
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
  LinearSpec gate_up = {.biases = config.biases,
                        .pack = config.pack_weights,
                        .share = config.share},
             down = gate_up;
  for (const std::string& prefix : prefixes) {
    gate_up.weights.push_back(GateUpSpec(config, prefix, holders));
    down.weights.push_back(DownSpec(config, prefix, holders));
  }
  MOE_ASSIGN_OR_RETURN(Linear<T> gate_up_products, Linear<T>::Create(gate_up, store));
  MOE_ASSIGN_OR_RETURN(Linear<T> down_products, Linear<T>::Create(down, store));
  return std::unique_ptr<Experts>(
      new Experts(config, std::move(gate_up_products), std::move(down_products)));
}

template <typename T>
absl::Status Experts<T>::Prepare(MatrixView<const T> rows, Workspace& workspace,
                                 ExpertsSaved<T>& saved,
                                 const std::optional<GatheredRows>& gathered) const {
  saved.gathered = gathered;
  saved.own = rows;
  if (gathered.has_value()) {
    MOE_ASSIGN_OR_RETURN(saved.all, workspace.Matrix<T>(gathered->rows(), rows.cols()));
    rows = saved.all;
  }
  saved.rows = rows;
  MOE_ASSIGN_OR_RETURN(
      saved.gate_up,
      workspace.Matrix<T>(rows.rows(), IsGated(config_.activation) ? 2 * width_ : width_));
  saved.hidden = {};
  if (!config_.keep_hidden) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(saved.hidden, workspace.Matrix<T>(rows.rows(), width_));
  return absl::OkStatus();
}

template <typename T>
absl::Status Experts<T>::PrepareBackward(Workspace& workspace, ExpertsSaved<T>& saved) const {
  if (saved.gathered.has_value()) {
    MOE_ASSIGN_OR_RETURN(saved.d_out, workspace.Matrix<T>(saved.rows.rows(), saved.rows.cols()));
  }
  if (!MakesHiddenAgain()) return absl::OkStatus();
  MOE_ASSIGN_OR_RETURN(saved.hidden, workspace.Matrix<T>(saved.gate_up.rows(), width_));
  return absl::OkStatus();
}

template <typename T>
MatrixView<T> Experts<T>::UpColumns(MatrixView<T> gate_up) const {
  if (!IsGated(config_.activation)) return {};
  return ColumnRange(gate_up, width_, 2 * width_);
}

template <typename T>
absl::Status Experts<T>::Activate(MatrixView<T> gate_up, MatrixView<T> hidden,
                                  Stream& stream) const {
  return ActivationForward<T>(config_.activation, ColumnRange(gate_up, 0, width_),
                              UpColumns(gate_up), hidden, stream);
}

template <typename T>
absl::Status Experts<T>::Forward(const Context& context, const LinearRows& networks,
                                 ExpertsSaved<T>& saved, MatrixView<T> out) const {
  const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto mine, RowsOf(networks, saved, *context.host_workspace));
  const auto& [begin, end, rows] = mine;
  if (begin == end) return absl::OkStatus();
  if (rows.gathered != nullptr) {
    MOE_RETURN_IF_ERROR(
        rows.gathered->Gather(context, rows.first, rows.last, saved.own, saved.all, rows.site));
  }
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  MatrixView<T> hidden;
  if (config_.keep_hidden) {
    hidden = RowRange(saved.hidden, begin, end);
  } else {
    MOE_ASSIGN_OR_RETURN(hidden, context.workspace->Matrix<T>(end - begin, width_));
  }
  MOE_RETURN_IF_ERROR(gate_up_.Forward(context, rows, RowRange(saved.rows, begin, end), gate_up));
  MOE_RETURN_IF_ERROR(Activate(gate_up, hidden, *context.compute));
  return down_.Forward(context, rows, hidden, mine.Out(out, config_.share));
}

template <typename T>
absl::Status Experts<T>::InputGradient(const Context& context, const LinearRows& networks,
                                       ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                                       MatrixView<T> d_rows) const {
  const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
  MOE_ASSIGN_OR_RETURN(const auto mine, RowsOf(networks, saved, *context.host_workspace));
  const auto& [begin, end, rows] = mine;
  if (begin == end) return absl::OkStatus();
  if (rows.gathered != nullptr) {
    MOE_RETURN_IF_ERROR(
        rows.gathered->Gather(context, rows.first, rows.last, d_out, saved.d_out, rows.site));
    d_out = saved.d_out;
  }
  MOE_ASSIGN_OR_RETURN(const auto d_hidden, context.workspace->Matrix<T>(end - begin, width_));
  MOE_RETURN_IF_ERROR(down_.InputGradient(context, rows, RowRange(d_out, begin, end), d_hidden));
  const auto gate_up = RowRange(saved.gate_up, begin, end);
  const auto gate = ColumnRange(gate_up, 0, width_);
  const auto up = UpColumns(gate_up);
  if (MakesHiddenAgain()) {
    MOE_RETURN_IF_ERROR(Activate(gate_up, RowRange(saved.hidden, begin, end), *context.compute));
  }
  MOE_RETURN_IF_ERROR(
      ActivationBackward<T>(config_.activation, gate, up, d_hidden, gate, up, *context.compute));
  return gate_up_.InputGradient(context, rows, gate_up, mine.Out(d_rows, config_.share));
}

template <typename T>
absl::Status Experts<T>::WeightGradient(const Context& context, const GroupOffsets& segment_offsets,
                                        const ExpertsSaved<T>& saved, MatrixView<const T> d_out,
                                        GradientReady ready) const {
  if (!config_.train) return absl::OkStatus();
  const WorkspaceScope scope(*context.workspace), host_scope(*context.host_workspace);
  LinearRows rows = {.first = 0, .last = local_experts(), .segments = segment_offsets};
  if (saved.gathered.has_value()) {
    rows.segments = saved.gathered->segments();
    d_out = saved.d_out;
  }
  if (!segment_offsets.known_to_host()) {
    MOE_ASSIGN_OR_RETURN(const bool by_cublas,
                         TakesCublas<T>("Experts::WeightGradient", context.gemm, 1, d_out.rows()));
    if (by_cublas) {
      MOE_ASSIGN_OR_RETURN(const auto host, OnHost(segment_offsets.device(), context));
      rows.segments = GroupOffsets::OnDevice(segment_offsets.device(), host);
    }
  }
  MOE_RETURN_IF_ERROR(down_.WeightGradient(context, rows, d_out, saved.hidden, ready));
  return gate_up_.WeightGradient(context, rows, saved.gate_up, saved.rows, ready);
}

template class Experts<float>;
template class Experts<BFloat16>;
template class Experts<Float16>;

}  // namespace moe
