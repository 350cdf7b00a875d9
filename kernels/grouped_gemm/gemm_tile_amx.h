// The tile unit of CPUs with AMX, which multiplies strips of bfloat16, and a unit in software that
// runs the same code with every access checked. Internal.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_AMX_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_AMX_H_

#include <cstdint>

#include "kernels/grouped_gemm/gemm_tile_order.h"

namespace moe::gemm {

enum class AmxState : uint8_t {
  kReady,
  kNoCpu,    // or the operating system does not save tiles
  kRefused,  // the kernel or the container permits no tiles
};

// Whether this process may use AMX tiles of bfloat16. The first call asks the kernel; once it has
// permitted them, it refuses alternate signal stacks that are too small for their state.
AmxState AmxOfThisCpu();
// Whether products use them, which they do where they can unless UseAmx forbids it
// (simd_targets.h).
bool UsesAmx();
void UseAmx(bool use);

// For tests: strips are multiplied by the kernel for AMX on the unit in software, which aborts on
// an access out of bounds or without configuration.
bool UsesCheckedTiles();
void UseCheckedTiles(bool use);

// This thread's tile unit, or the one in software, is configured while an object lives.
class TileSession {
 public:
  TileSession();
  ~TileSession();
  TileSession(const TileSession&) = delete;
  TileSession& operator=(const TileSession&) = delete;

 private:
  bool configured_;
};

// Both require a TileSession, the first UsesAmx(), too.
void MultiplyOnAmx(const StripProduct& product, Prefetchers& ahead);
void MultiplyOnCheckedTiles(const StripProduct& product, Prefetchers& ahead);

// Runs `steps` rounds of independent tile products in registers. Returns the number of
// floating-point operations. Requires UsesAmx().
double RunTiles(int64_t steps);

}  // namespace moe::gemm

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_TILE_AMX_H_
