// cuBLAS, and whether products may take it. Loaded when it is asked for, so that programs start on
// machines without it. Nothing of CUDA in this header: for programs.
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

// A handle of cuBLAS for one stream of a CUDA device, with a workspace of its own, so that results
// do not depend on what other streams run. One host thread at a time. The stream must have passed
// all products when this ends.
class Cublas {
 public:
  // Allocates. Errors: as MakeStream; kUnimplemented, with the remedy, without the library.
  static absl::StatusOr<std::unique_ptr<Cublas>> Create(int device);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  // Enqueues c (+)= a * b, of at least one term an element. Float32 products and sums (never TF32),
  // rounded to TOut once; the order of terms is cuBLAS's choice by shape and alignment: the same
  // bits for the same of both on one kind of GPU. T: float, BFloat16 or Float16; TOut: float or T.
  // `function` is the caller's name in errors: kInvalidArgument for another device's stream.
  template <typename T, typename TOut>
  absl::Status Multiply(absl::string_view function, const gemm::Problem<T, TOut>& problem,
                        Stream& stream);

 private:
  Cublas(void* handle, int device, Buffer workspace)
      : handle_(handle), device_(device), workspace_(std::move(workspace)) {}

  [[maybe_unused]] void* const handle_;  // of builds with CUDA
  const int device_;
  const Buffer workspace_;
};

// Whether it multiplies, as `options` say. It does not say what it makes of products without terms.
// Errors: kInvalidArgument, in the name of `function`, for kCublas without one.
template <typename T>
absl::StatusOr<bool> TakesCublas(absl::string_view function, const GemmOptions& options,
                                 size_t groups, int64_t depth);

// Whether a row must have the same bits for any number of rows beside it.
enum class RowBits : uint8_t { kMayDependOnCount, kIndependent };

// What GemmOptions of `kernel` need besides for streams of `device`: nullptr if nothing (kMma;
// kAuto for rows that are independent, on a CPU, and where the library is missing).
// Errors: kInvalidArgument for kCublas on a CPU or with independent rows; else Create's.
absl::StatusOr<std::unique_ptr<Cublas>> MakeCublas(GroupedGemmKernel kernel, RowBits rows,
                                                   Device device);

}  // namespace moe

#endif  // MOE_KERNELS_GROUPED_GEMM_GEMM_CUBLAS_H_
