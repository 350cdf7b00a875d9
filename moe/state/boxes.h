// Where canonical tensors are in a parameter's memory: the one translation between the two.
#ifndef MOE_MOE_STATE_BOXES_H_
#define MOE_MOE_STATE_BOXES_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "moe/state/canonical_tensor.h"
#include "moe/state/parameter.h"

namespace moe {

// Elements [begin, end).
struct ElementRange {
  int64_t begin = 0, end = 0;
  int64_t size() const { return end - begin; }
};
// What is in both; of a size below 1 where nothing is.
inline ElementRange Common(ElementRange a, ElementRange b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// A box of a canonical tensor that is stored row by row, without gaps, in a parameter's memory.
struct BoxInMemory {
  const CanonicalTensor* tensor;
  TensorBox box;
  int64_t first;  // element of the parameter where the box begins

  ElementRange range() const { return {first, first + box.size()}; }
};

// The boxes, none empty and in the order of memory, that elements `memory` of the parameter are:
// whole rows of what this rank holds of each tensor (Parameter::box).
std::vector<BoxInMemory> BoxesOf(const Parameter& parameter, ElementRange memory);
// The boxes of all its elements.
inline std::vector<BoxInMemory> BoxesOf(const Parameter& parameter) {
  return BoxesOf(parameter, {0, parameter.size()});
}

}  // namespace moe

#endif  // MOE_MOE_STATE_BOXES_H_
