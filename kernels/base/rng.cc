#include "kernels/base/rng.h"

#include "kernels/base/philox.h"

namespace moe {

std::array<uint32_t, 4> Random4(const RandomKey& key, uint32_t block) {
  const auto out = Philox(key, block);
  return {out[0], out[1], out[2], out[3]};
}

double Uniform(const RandomKey& key, uint32_t index) {
  return (Random4(key, index / 4)[index % 4] + 0.5) * 0x1p-32;
}

double Normal(const RandomKey& key, uint32_t index) {
  const auto r = Philox(key, index / 2);
  return BoxMuller(r[index % 2 * 2], r[index % 2 * 2 + 1]);
}

}  // namespace moe
