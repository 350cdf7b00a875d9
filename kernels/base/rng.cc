#include "kernels/base/rng.h"

#include <cmath>
#include <numbers>

#include <Random123/philox.h>

namespace moe {

std::array<uint32_t, 4> Random4(const RandomKey& key, uint32_t block) {
  // Key words: the seed, with purpose and layer mixed in by odd multipliers (Weyl constants), so
  // that neighbouring layers do not share a key.
  const uint64_t mixed =
      key.seed * 0x9e3779b97f4a7c15u +
      (static_cast<uint64_t>(key.purpose) << 32 | key.layer) * 0xd1342543de82ef95u;
  r123::Philox4x32::ctr_type counter = {{static_cast<uint32_t>(key.item),
                                         static_cast<uint32_t>(key.item >> 32),
                                         static_cast<uint32_t>(key.step), block}};
  const r123::Philox4x32::key_type philox_key = {
      {static_cast<uint32_t>(mixed), static_cast<uint32_t>(mixed >> 32)}};
  const auto out = r123::Philox4x32{}(counter, philox_key);
  return {out[0], out[1], out[2], out[3]};
}

double Uniform(const RandomKey& key, uint32_t index) {
  return (Random4(key, index / 4)[index % 4] + 0.5) * 0x1p-32;
}

double Normal(const RandomKey& key, uint32_t index) {
  const std::array<uint32_t, 4> r = Random4(key, index / 2);
  const double u = (r[index % 2 * 2] + 0.5) * 0x1p-32;
  const double v = (r[index % 2 * 2 + 1] + 0.5) * 0x1p-32;
  return std::sqrt(-2.0 * std::log(u)) * std::cos(2.0 * std::numbers::pi * v);
}

}  // namespace moe
