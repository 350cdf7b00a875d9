// How an exact grid changed the partials of a sum. Plain C++: .cu files include it.
#ifndef MOE_KERNELS_EXACT_SUM_GRID_TALLY_H_
#define MOE_KERNELS_EXACT_SUM_GRID_TALLY_H_

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>

namespace moe {

// Integers that are added up or compared, so that results depend on neither order, threads nor
// ranks. The error of each inexact partial is at most half a unit, which bounds the grid's error in
// a sum.
struct GridTally {
  int64_t non_finite = 0;  // NaN, infinite or too large for the grid; not added
  int64_t inexact = 0;     // other partials that the grid rounded
  int64_t largest = 0;     // |partial| as the bits of a float32; those of infinity for a NaN

  void Add(const GridTally& other) {
    non_finite += other.non_finite;
    inexact += other.inexact;
    largest = std::max(largest, other.largest);
  }
  float largest_value() const { return std::bit_cast<float>(static_cast<uint32_t>(largest)); }
  static int64_t BitsOf(float magnitude) { return std::bit_cast<uint32_t>(magnitude); }

  friend bool operator==(const GridTally&, const GridTally&) = default;
};

// Adds a tally; for host threads that share a sum.
inline void AddAtomically(const GridTally& mine, GridTally& sum) {
  constexpr auto kRelaxed = std::memory_order_relaxed;
  if (mine.non_finite > 0) std::atomic_ref(sum.non_finite).fetch_add(mine.non_finite, kRelaxed);
  if (mine.inexact > 0) std::atomic_ref(sum.inexact).fetch_add(mine.inexact, kRelaxed);
  const std::atomic_ref largest(sum.largest);
  int64_t before = largest.load(kRelaxed);
  while (before < mine.largest && !largest.compare_exchange_weak(before, mine.largest, kRelaxed)) {
  }
}

}  // namespace moe

#endif  // MOE_KERNELS_EXACT_SUM_GRID_TALLY_H_
