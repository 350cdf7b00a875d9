#include "kernels/base/tree_cut.h"

namespace moe {

absl::InlinedVector<TreeNode, 6> LargestNodes(int first, int last) {
  absl::InlinedVector<TreeNode, 6> nodes;
  while (first < last) {
    int size = 1;
    while (first % (2 * size) == 0 && first + 2 * size <= last) size *= 2;
    nodes.push_back({first, first + size});
    first += size;
  }
  return nodes;
}

}  // namespace moe
