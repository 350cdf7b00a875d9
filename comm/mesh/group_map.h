// A value for each group of a mesh.
#ifndef MOE_COMM_MESH_GROUP_MAP_H_
#define MOE_COMM_MESH_GROUP_MAP_H_

#include <array>
#include <cstddef>

#include "comm/mesh/mesh_shape.h"

namespace moe {

// Iterates in the order of MeshGroup. Users whose groups share communicators index it by
// Mesh::Canonical, so that groups of the same ranks have one value.
template <typename V>
class GroupMap {
 public:
  V& operator[](MeshGroup group) { return values_[static_cast<size_t>(group)]; }
  const V& operator[](MeshGroup group) const { return values_[static_cast<size_t>(group)]; }
  auto begin() { return values_.begin(); }
  auto end() { return values_.end(); }
  auto begin() const { return values_.begin(); }
  auto end() const { return values_.end(); }

 private:
  std::array<V, static_cast<size_t>(MeshGroup::kCount)> values_ = {};
};

}  // namespace moe

#endif  // MOE_COMM_MESH_GROUP_MAP_H_
