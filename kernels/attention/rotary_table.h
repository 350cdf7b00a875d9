// Cosines and sines for ApplyRotary.
#ifndef MOE_KERNELS_ATTENTION_ROTARY_TABLE_H_
#define MOE_KERNELS_ATTENTION_ROTARY_TABLE_H_

#include <cstdint>
#include <utility>

#include <absl/status/statusor.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"

namespace moe {

// cos and sin of position * base^(-2d/D), computed in float64 and rounded to float32 once:
// [positions, D/2] each, memory of one device.
class RotaryTable {
 public:
  RotaryTable(Buffer values, int64_t positions)
      : values_(std::move(values)), positions_(positions) {}

  int64_t positions() const { return positions_; }
  const float* cosine() const { return values_.span<float>().data(); }
  const float* sine() const { return cosine() + values_.span<float>().size() / 2; }

  // Returns a table of D/2 = `half` for at least `positions` positions, ready for every stream of
  // `device`. It is computed once for (base, half, device), and again for at least twice as many
  // positions when more are needed; the call then blocks until the table is computed and, on CUDA,
  // copied. Tables live as long as the process, because streams may still read a shorter one; all
  // shorter ones together take no more memory than the longest. Thread-safe. Errors:
  // kResourceExhausted, and on CUDA devices those of MakeStream.
  static absl::StatusOr<const RotaryTable*> For(float base, int64_t half, int64_t positions,
                                                Device device);

 private:
  Buffer values_;  // cosines, then sines
  int64_t positions_;
};

}  // namespace moe

#endif  // MOE_KERNELS_ATTENTION_ROTARY_TABLE_H_
