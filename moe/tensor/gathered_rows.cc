#include "moe/tensor/gathered_rows.h"

#include <algorithm>
#include <limits>

#include <absl/strings/str_cat.h>

#include "comm/tree_reduce_scatter.h"
#include "kernels/base/dtype.h"
#include "kernels/base/status_macros.h"
#include "kernels/permute/permute.h"

namespace moe {

absl::StatusOr<GatheredRows> GatheredRows::Create(const Inputs& inputs, const Pass& pass) {
  const Context& context = pass.context;
  Workspace& workspace = pass.kept_host();
  const Site site = pass.site.Named("plan");
  const auto segments = std::ssize(inputs.segments) - 1;
  MOE_ASSIGN_OR_RETURN(const auto mine, workspace.Array<int32_t>(segments));
  for (size_t s = 0; s < mine.size(); ++s) {
    mine[s] = static_cast<int32_t>(inputs.segments[s + 1] - inputs.segments[s]);
  }
  // [R, L S]
  MOE_ASSIGN_OR_RETURN(const auto counts, workspace.Array<int32_t>(segments * inputs.share.ranks));
  Communicator& group = context.mesh->group(inputs.share.group);
  MOE_RETURN_IF_ERROR(group.AllGather<int32_t>(mine, counts, *context.host, site));
  MOE_RETURN_IF_ERROR(context.host->Synchronize());
  GatheredRows gathered;
  gathered.share_ = inputs.share;
  MOE_RETURN_IF_ERROR(gathered.CountRows(inputs, counts, workspace));
  MOE_RETURN_IF_ERROR(gathered.OrderRows(inputs, counts, workspace));
  MOE_ASSIGN_OR_RETURN(gathered.place_, KeptOnDevice(gathered.place_, pass));
  MOE_ASSIGN_OR_RETURN(gathered.row_at_, KeptOnDevice(gathered.row_at_, pass));
  return gathered;
}

absl::Status GatheredRows::CountRows(const Inputs& inputs, absl::Span<const int32_t> counts,
                                     Workspace& workspace) {
  const auto ranks = static_cast<size_t>(share_.ranks);
  const auto networks = static_cast<size_t>(inputs.first_network.back());
  const size_t each = networks == 0 ? 0 : counts.size() / ranks / networks;  // segments
  MOE_ASSIGN_OR_RETURN(const auto by_rank,
                       workspace.Array<int64_t>(static_cast<int64_t>(ranks * (networks + 1))));
  MOE_ASSIGN_OR_RETURN(const auto network,
                       workspace.Array<int64_t>(static_cast<int64_t>(networks) + 1));
  std::fill(network.begin(), network.end(), 0);
  for (size_t r = 0; r < ranks; ++r) {
    const auto rows = by_rank.subspan(r * (networks + 1), networks + 1);
    const auto theirs = counts.subspan(r * networks * each, networks * each);
    rows[0] = 0;
    for (size_t l = 0; l < networks; ++l) {
      rows[l + 1] = rows[l];
      for (const int32_t count : theirs.subspan(l * each, each)) rows[l + 1] += count;
      network[l + 1] += rows[l + 1];
    }
  }
  by_rank_ = by_rank;
  network_ = network;
  if (network_.back() <= std::numeric_limits<int32_t>::max()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("GatheredRows: ", network_.back(), " rows of ",
                                                 ranks, " ranks, expected fewer than 2^31"));
}

absl::Status GatheredRows::OrderRows(const Inputs& inputs, absl::Span<const int32_t> counts,
                                     Workspace& workspace) {
  const int ranks = share_.ranks, networks = inputs.first_network.back();
  const int64_t of_rank = std::ssize(counts) / ranks;  // L S
  const int64_t each = networks == 0 ? 0 : of_rank / networks;
  const int64_t of_source = each / inputs.sources;
  MOE_ASSIGN_OR_RETURN(const auto place, workspace.Array<int32_t>(rows()));
  MOE_ASSIGN_OR_RETURN(const auto row_at, workspace.Array<int32_t>(rows()));
  MOE_ASSIGN_OR_RETURN(const auto segments,
                       workspace.Array<int64_t>(std::ssize(counts) / inputs.together + 1));
  // Next place of each rank's rows, which are one behind the other among those gathered at once.
  MOE_ASSIGN_OR_RETURN(const auto next, workspace.Array<int32_t>(ranks));
  int64_t row = 0, segment = 0;
  segments[0] = 0;
  for (size_t c = 0; c + 1 < inputs.first_network.size(); ++c) {
    const int first = inputs.first_network[c], last = inputs.first_network[c + 1];
    const RankCounts begin = RowsByRank(first, last);
    for (int r = 0; r < ranks; ++r) next[r] = static_cast<int32_t>(begin[r]);
    const int64_t chunk = network_[first];
    for (int64_t at = int64_t{first} * each; at < int64_t{last} * each; at += of_source) {
      for (int r = 0; r < ranks; ++r) {
        for (const int32_t count : counts.subspan(r * of_rank + at, of_source)) {
          for (int32_t i = 0; i < count; ++i, ++row) {
            place[row] = next[r];
            row_at[chunk + next[r]++] = static_cast<int32_t>(row - chunk);
          }
          if (++segment % inputs.together == 0) segments[segment / inputs.together] = row;
        }
      }
    }
  }
  place_ = place;
  row_at_ = row_at;
  segments_ = segments;
  return absl::OkStatus();
}

RankCounts GatheredRows::RowsByRank(int first, int last) const {
  RankCounts offsets = {0};
  for (int r = 0; r < share_.ranks; ++r) {
    const absl::Span<const int64_t> rows = OffsetsOf(r);
    offsets.push_back(offsets.back() + rows[last] - rows[first]);
  }
  return offsets;
}

absl::StatusOr<GroupOffsets> GatheredRows::OwnOffsets(int first, int last,
                                                      Workspace& workspace) const {
  const absl::Span<const int64_t> mine = OffsetsOf(share_.index);
  MOE_ASSIGN_OR_RETURN(const auto own, workspace.Array<int64_t>(last - first + 1));
  for (int l = first; l <= last; ++l) own[l - first] = mine[l] - mine[first];
  return GroupOffsets(own);
}

template <typename T>
absl::Status GatheredRows::Gather(const Context& context, int first, int last,
                                  MatrixView<const T> own, MatrixView<T> all,
                                  const Site& site) const {
  const MatrixView<const T> mine = Own(own, first, last);
  const MatrixView<T> to = All(all, first, last);
  const int64_t cols = own.cols(), count = to.rows();
  if (count == 0) return absl::OkStatus();
  Stream& stream = *context.compute;
  MOE_ASSIGN_OR_RETURN(const auto by_rank, context.workspace->Matrix<T>(count, cols));
  RankCounts counts;
  const RankCounts rows = RowsByRank(first, last);
  for (int r = 0; r < share_.ranks; ++r) counts.push_back((rows[r + 1] - rows[r]) * cols);
  const auto exchange = [&](Communicator& group, const Site& at) {
    return group.AllGatherV<T>({mine.data(), static_cast<size_t>(mine.rows() * cols)},
                               {by_rank.data(), static_cast<size_t>(count * cols)}, counts, stream,
                               at);
  };
  MOE_RETURN_IF_ERROR(TensorExchange(context, site.Named("expert rows"), exchange, share_.group));
  return GatherRows<T>(by_rank, place_.subspan(network_[first], count), to, stream);
}

template <typename T>
absl::Status GatheredRows::Sum(const Context& context, int first, int last, const TreeCut& cut,
                               MatrixView<const float> nodes, MatrixView<T> own,
                               const Site& site) const {
  const int64_t count = nodes.rows();
  if (count == 0) return absl::OkStatus();
  Stream& stream = *context.compute;
  MOE_ASSIGN_OR_RETURN(const auto by_rank, context.workspace->Matrix<float>(count, nodes.cols()));
  MOE_RETURN_IF_ERROR(
      GatherRows<float>(nodes, row_at_.subspan(network_[first], count), by_rank, stream));
  const RankCounts rows = RowsByRank(first, last);
  const TreeScatter<T> scatter = {.cut = cut, .row_offsets = rows, .nodes = by_rank, .out = own};
  const auto exchange = [&](Communicator& group, const Site& at) {
    return TreeReduceScatter<T>(scatter, group, *context.workspace, stream, at);
  };
  return TensorExchange(context, site.Named("expert sum"), exchange, share_.group);
}

#define MOE_INSTANTIATE(T)                                                                     \
  template absl::Status GatheredRows::Gather(const Context&, int, int, MatrixView<const T>,    \
                                             MatrixView<T>, const Site&) const;                \
  template absl::Status GatheredRows::Sum(const Context&, int, int, const TreeCut&,            \
                                          MatrixView<const float>, MatrixView<T>, const Site&) \
      const;
MOE_FOR_STORAGE_TYPES(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

}  // namespace moe
