// cuBLAS, and whether products may use it. Loaded on demand, so that programs start on machines
// without it. No CUDA headers here: for programs.
#ifndef MOE_KERNELS_GROUPED_GEMM_GEMM_CUBLAS_H_
#define MOE_KERNELS_GROUPED_GEMM_GEMM_CUBLAS_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include <absl/status/status.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

#include "kernels/base/buffer.h"
#include "kernels/base/stream.h"
#include "kernels/grouped_gemm/gemm_options.h"
#include "kernels/grouped_gemm/gemm_problem.h"

namespace moe {

// A cuBLAS handle for one stream of a CUDA device, with a workspace of its own, so that results do
// not depend on what other streams run. Used by one host thread at a time. The stream must have
// passed all products before destruction.
class Cublas {
 public:
  // Allocates. Errors: as MakeStream; kUnimplemented, with the remedy, without the library.
  static absl::StatusOr<std::unique_ptr<Cublas>> Create(int device);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  // Enqueues c (+)= a * b, with at least one term an element. Float32 products and sums (never
  // TF32), rounded to TOut once; cuBLAS chooses the order of terms by shape and alignment, so that
  // the bits are the same for the same shape and alignment on one kind of GPU. T: float, BFloat16
  // or Float16; TOut: float or T. `function` is the caller's name in errors: kInvalidArgument for
  // another device's stream.
  template <typename T, typename TOut>
  absl::Status Multiply(absl::string_view function, const gemm::Problem<T, TOut>& problem,
                        Stream& stream);

 private:
  Cublas(void* handle, int device, Buffer workspace)
      : handle_(handle), device_(device), workspace_(std::move(workspace)) {}

  [[maybe_unused]] void* const handle_;  // used in builds with CUDA
  const int device_;
  const Buffer workspace_;
};

// Whether `options` select cuBLAS for the product. Never for one without terms, whose result cuBLAS
// does not specify. Errors: kInvalidArgument, in the name of `function`, for kCublas without a
// handle.
template <typename T>
absl::StatusOr<bool> TakesCublas(absl::string_view function, const GemmOptions& options,
                                 size_t groups, int64_t depth);

// Whether the bits of a row must be independent of the number of other rows.
enum class RowBits : uint8_t { kMayDependOnCount, kIndependent };

// The handle that GemmOptions of `kernel` need for streams of `device`; nullptr if none (kMma;
// kAuto with independent rows, on a CPU, or where the library is missing).
// Errors: kInvalidArgument for kCublas on a CPU or with independent rows; else Create's.
absl::StatusOr<std::unique_ptr<Cublas>> MakeCublas(GroupedGemmKernel kernel, RowBits rows,
                                                   Device device);

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_CUBLAS_H_
