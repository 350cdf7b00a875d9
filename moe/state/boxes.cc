#include "moe/state/boxes.h"

#include <utility>

#include "kernels/base/status_macros.h"

namespace moe {

std::vector<BoxInMemory> BoxesOf(const Parameter& parameter, ElementRange memory) {
  std::vector<BoxInMemory> boxes;
  int64_t first = 0;
  for (size_t i = 0; i < parameter.parts().size(); ++i) {
    TensorBox box = parameter.box(i);
    const ElementRange here = Common(memory, {first, first + box.size()});
    const int64_t begin = here.begin - std::exchange(first, first + box.size());
    if (here.size() <= 0) continue;
    MOE_CHECK(begin % box.cols() == 0 && here.size() % box.cols() == 0);
    box.row_begin += begin / box.cols();
    box.row_end = box.row_begin + here.size() / box.cols();
    boxes.push_back({&parameter.parts()[i], box, here.begin});
  }
  return boxes;
}

}  // namespace moe
