// What a rank holds of matrices that the ranks of a tensor group share.
#ifndef MOE_MOE_TENSOR_TENSOR_SHARE_H_
#define MOE_MOE_TENSOR_TENSOR_SHARE_H_

#include <absl/status/status.h>
#include <absl/status/statusor.h>

#include "comm/row_gather.h"
#include "kernels/base/tree_cut.h"
#include "moe/run/context.h"
#include "moe/state/parameter.h"

namespace moe {

// This rank among those that share matrices: of a cut matrix each holds the leaves that LeavesOf
// deals it. Ranks of a tensor group (kTensor) divide the rows of a micro-batch (own_rows.h); those
// of an expert-tensor group (kExpertTensor), which share experts, have the rows that each of them
// was sent (gathered_rows.h). Both gather rows before what they share.
struct TensorShare {
  int index = 0, ranks = 1;
  int leaves = 1;  // of trees (Context::tensor_leaves)
  MeshGroup group = MeshGroup::kTensor;
  DeviceKind device = DeviceKind::kCpu;  // that multiplies

  bool cut() const { return ranks > 1; }
  // Of `items` that stay together, those that this rank holds: [first, last).
  TreeNode ItemsOf(int items) const;
  // [R + 1] of N rows of a micro-batch those that each rank has as its own: whole segments, of
  // which there is one for each leaf.
  RankCounts RowsOf(int64_t rows) const;
};
TensorShare ShareOf(const Context& context, MeshGroup group = MeshGroup::kTensor);

// Runs exchange(group, site) among the ranks that share matrices: an event of the time line, with
// the name of the site and the bytes that leave this rank.
template <typename Exchange>
absl::Status TensorExchange(const Context& context, const Site& site, Exchange exchange,
                            MeshGroup among = MeshGroup::kTensor) {
  Communicator& group = context.mesh->group(among);
  return Timed(context, site, {.name = site.name, .group = &group}, *context.compute,
               [&] { return exchange(group, site); });
}

// The most ranks, up to `ranks`, for each of which an index has items.
int MostRanks(const TreeCut& cut, int ranks);

// `spec` of a whole parameter, as this rank holds it: with a box of each of its parts that are cut.
// kInvalidArgument if a part has too few items for the ranks; names the most ranks that it has
// items for.
absl::StatusOr<ParameterSpec> HeldPart(ParameterSpec spec, const TensorShare& share);
// On a CUDA device the kernel that multiplies numbers of 16 bits, and so the bits, depends on where
// rows begin: kInvalidArgument unless those of all ranks that share `spec`, and of one rank that
// has all of it, begin at multiples of 16 bytes along the axis that is cut.
absl::Status CheckHalfParts(const ParameterSpec& spec, const TensorShare& share);

}  // namespace moe

#endif  // MOE_MOE_TENSOR_TENSOR_SHARE_H_
