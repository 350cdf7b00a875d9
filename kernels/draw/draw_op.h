// Arguments and elements of draw.h, in the memory of one device. Internal. Plain C++: .cu files
// include it. Functions are instantiated for float, BFloat16 and Float16.
#ifndef MOE_KERNELS_DRAW_DRAW_OP_H_
#define MOE_KERNELS_DRAW_DRAW_OP_H_

#include <cstdint>

#include "kernels/base/cuda_types.h"
#include "kernels/base/dtype.h"
#include "kernels/base/philox.h"
#include "kernels/base/rng.h"

namespace moe::draw {

MOE_HOST_DEVICE inline RandomKey KeyOfItem(RandomKey key, int64_t item) {
  key.item += static_cast<uint64_t>(item);
  return key;
}

template <typename T>
struct Uniform {
  RandomKey key;
  T* values;
  int64_t count;

  MOE_HOST_DEVICE static T Of(uint32_t number) {
    return T(static_cast<float>(number) * 0x1p-31f - 1.0f);
  }
  MOE_HOST_DEVICE T operator()(int64_t i) const {
    return Of(Philox(KeyOfItem(key, i - i % 4), 0)[static_cast<unsigned>(i % 4)]);
  }
};

template <typename T>
struct Normal {
  RandomKey key;
  T* values;
  int64_t count;

  MOE_HOST_DEVICE T operator()(int64_t i) const {
    const auto four = Philox(KeyOfItem(key, i), 0);
    return T(static_cast<float>(BoxMuller(four[0], four[1])));
  }
};

// Enqueue on `stream` and return the launch error alone.
template <typename T>
cudaError_t Run(const Uniform<T>& uniform, cudaStream_t stream);
template <typename T>
cudaError_t Run(const Normal<T>& normal, cudaStream_t stream);

}  // namespace moe::draw

#endif  // MOE_KERNELS_DRAW_DRAW_OP_H_
