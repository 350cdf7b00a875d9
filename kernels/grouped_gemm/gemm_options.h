// Choice of the matrix product on CUDA devices, and of the order in which terms are added.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_

#include <cstdint>

#include "kernels/base/choice.h"
#include "kernels/base/tree_cut.h"

namespace moe {

class Cublas;  // gemm_cublas.h

// --grouped-gemm
enum class GroupedGemmKernel : uint8_t {
  kAuto,    // kMma, but cuBLAS for one group of a 16-bit type if GemmOptions has a handle
  kCublas,  // cuBLAS, one call a group
  kMma,     // this project's kernels: mma.sync or wgmma for 16-bit types, fmaf for float32
};
inline constexpr Choice<GroupedGemmKernel> kGroupedGemmWords[] = {
    {"auto", GroupedGemmKernel::kAuto},
    {"cublas", GroupedGemmKernel::kCublas},
    {"mma", GroupedGemmKernel::kMma}};

// --bf16-order: the order in which products of bfloat16 add their terms on a CPU. grouped_gemm.h
// has both, and one of them belongs to the numerics of a run.
enum class BFloat16Order : uint8_t {
  kDot,   // in pairs, like AVX-512's dot product
  kTile,  // in blocks of 32, like AMX's tiles
};
inline constexpr Choice<BFloat16Order> kBFloat16OrderWords[] = {{"dot", BFloat16Order::kDot},
                                                                {"tile", BFloat16Order::kTile}};

// Multiprocessors that products on a Hopper GPU leave free while kernels of other streams may run
// beside them. A block of such a product has a multiprocessor for itself until the product ends, so
// that a kernel which finds none free waits as long. Used by one host thread at a time.
class SpareMultiprocessors {
 public:
  // `count`: what such a kernel needs. At most half of a device's multiprocessors stay free.
  explicit SpareMultiprocessors(int count = 0) : count_(count) {}
  // How many the next product leaves free.
  int now() const { return uses_ > 0 ? count_ : 0; }

  // While one exists, such kernels may be under way.
  class Use {
   public:
    explicit Use(SpareMultiprocessors* spare) : spare_(spare) {  // nullptr: no effect
      if (spare_ != nullptr) ++spare_->uses_;
    }
    ~Use() {
      if (spare_ != nullptr) --spare_->uses_;
    }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;

   private:
    SpareMultiprocessors* const spare_;
  };

 private:
  int count_;
  int uses_ = 0;
};

// Without cuBLAS the bits of a row depend on that row and its weight alone. With it they may also
// depend on the number of rows, and the order of terms is the library's. Products that are trees
// (GemmTree) are never cuBLAS's.
struct GemmOptions {
  GroupedGemmKernel kernel = GroupedGemmKernel::kAuto;  // on CUDA
  // handle for the stream that is passed with the options; kCublas needs it
  Cublas* cublas = nullptr;
  BFloat16Order bfloat16_order = BFloat16Order::kDot;  // on a CPU
  // read when a product is enqueued; does not change bits; nullptr: none. cuBLAS ignores it.
  SpareMultiprocessors* spare = nullptr;

  int spare_multiprocessors() const { return spare == nullptr ? 0 : spare->now(); }
};

// The order in which a product adds its terms. One leaf, the default: one sum of chains over all
// terms. Several: the reduced index consists of `parts` parts of cut.extent values, one after the
// other (gate and up; q, k and v), each cut alike. Leaf s of a balanced binary tree is such a sum
// over leaf s of part 0, then of part 1, and so on. In part 0 every value of the cut may be
// `first_times` values of the index (query heads that share a key head): that part is so many times
// as long. grouped_gemm.h has the contract.
struct GemmTree {
  static constexpr int kMaxParts = 3;

  TreeCut cut;
  int parts = 1;
  int64_t first_times = 1;

  bool operator==(const GemmTree&) const = default;
  constexpr int64_t Times(int part) const { return part == 0 ? first_times : 1; }
  // First value of a part; the number of values for part = parts.
  constexpr int64_t Begin(int part) const {
    return part == 0 ? 0 : (first_times + part - 1) * cut.extent;
  }
};

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_OPTIONS_H_
