// Philox4x32-10, the generator of rng.h, for code that runs on the host or a GPU. Internal.
#ifndef MOE_KERNELS_BASE_PHILOX_H_
#define MOE_KERNELS_BASE_PHILOX_H_

#include <cmath>
#include <cstdint>
#include <numbers>

#include <Random123/philox.h>

#include "kernels/base/rng.h"
#include "kernels/base/tensor_view.h"

namespace moe {

// The numbers of Random4.
MOE_HOST_DEVICE inline r123::Philox4x32::ctr_type Philox(const RandomKey& key, uint32_t block) {
  // Key words: the seed, with purpose and layer mixed in by odd multipliers (Weyl constants), so
  // that neighbouring layers do not share a key.
  const uint64_t mixed =
      key.seed * 0x9e3779b97f4a7c15u +
      (static_cast<uint64_t>(key.purpose) << 32 | key.layer) * 0xd1342543de82ef95u;
  const r123::Philox4x32::ctr_type counter = {{static_cast<uint32_t>(key.item),
                                               static_cast<uint32_t>(key.item >> 32),
                                               static_cast<uint32_t>(key.step), block}};
  const r123::Philox4x32::key_type philox_key = {
      {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)}};
  return r123::Philox4x32{}(counter, philox_key);
}

// Standard normal of two numbers by Box-Muller.
MOE_HOST_DEVICE inline double BoxMuller(uint32_t radius, uint32_t angle) {
  const double u = (radius + 0.5) * 0x1p-32, v = (angle + 0.5) * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace moe

#endif  // MOE_KERNELS_BASE_PHILOX_H_
