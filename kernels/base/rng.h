// Random numbers that depend on their purpose and position only, not on the caller or the time of
// the call.
#ifndef MOE_KERNELS_BASE_RNG_H_
#define MOE_KERNELS_BASE_RNG_H_

#include <array>
#include <cstdint>

namespace moe {

// The purpose of a random number: streams of different purposes never overlap.
enum class RandomPurpose : uint32_t {
  kInit = 1,          // initial parameters
  kShuffle = 2,       // order of sequences in an epoch
  kJitter = 3,        // Switch input jitter
  kNoise = 4,         // noisy top-k
  kSecondExpert = 5,  // GShard random second choice
  kData = 6,          // synthetic inputs
  kSample = 7,        // next token of a text
};

// The key of a random number. Equal keys give equal numbers on every rank and device.
struct RandomKey {
  uint64_t seed = 0;
  RandomPurpose purpose = RandomPurpose::kInit;
  uint32_t layer = 0;  // or a hash of the parameter's name
  uint64_t step = 0;
  uint64_t item = 0;  // global token id, or element index
};

// Four independent 32-bit numbers: Philox4x32-10 (Salmon et al., SC 2011; Random123), counter =
// (item, step), key = mix of seed, purpose and layer. `block` counts the blocks of one key.
std::array<uint32_t, 4> Random4(const RandomKey& key, uint32_t block = 0);

// Uniform in (0, 1): (x + 0.5) / 2^32.
double Uniform(const RandomKey& key, uint32_t index = 0);

// Standard normal by Box-Muller, in double. Element `index` of the key's sequence.
double Normal(const RandomKey& key, uint32_t index = 0);

}  // namespace moe

#endif  // MOE_KERNELS_BASE_RNG_H_
