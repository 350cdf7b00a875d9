#include "kernels/grouped_gemm/gemm_cublas.h"

#include <type_traits>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"

#if defined(MOE_CUDA) && __has_include(<cublas_v2.h>)
#define MOE_CUBLAS
#include <dlfcn.h>

#include <cublas_v2.h>
#endif

namespace moe {

#if defined(MOE_CUBLAS)
namespace {

// cuBLAS's recommendation for sm_90; smaller GPUs need less.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

#define MOE_CUBLAS_FUNCTIONS(F) \
  F(cublasCreate_v2)            \
  F(cublasDestroy_v2)           \
  F(cublasSetStream_v2)         \
  F(cublasSetWorkspace_v2) F(cublasSetMathMode) F(cublasGemmEx_64) F(cublasGetStatusName)

struct Functions {
#define MOE_DECLARE(name) decltype(&::name) name;
  MOE_CUBLAS_FUNCTIONS(MOE_DECLARE)
#undef MOE_DECLARE
};

// Simulated devices use the simulator's cuBLAS.
#if defined(MOE_CUBLAS_LINKED)
#define MOE_LOAD(name) functions.name = &::name;
#else
// Looks up function `name` in the library, of the version that the header declares. The library
// stays open.
template <typename Function>
absl::Status Find(const char* name, Function*& function) {
  const auto file = absl::StrCat("libcublas.so.", CUBLAS_VER_MAJOR);
  void* const library = dlopen(file.c_str(), RTLD_NOW | RTLD_LOCAL);
  function = library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
  if (function != nullptr) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("cuBLAS: ", dlerror(), ": put the folder of ", file,
                   " (lib64 of the CUDA toolkit) in LD_LIBRARY_PATH, or do without it: "
                   "--grouped-gemm mma"));
}
#define MOE_LOAD(name) MOE_RETURN_IF_ERROR(Find(#name, functions.name));
#endif

absl::StatusOr<Functions> Load() {
  Functions functions = {};
  MOE_CUBLAS_FUNCTIONS(MOE_LOAD)
  return functions;
}

const absl::StatusOr<Functions>& Library() {
  static const auto* const library = new absl::StatusOr<Functions>(Load());
  return *library;
}

absl::Status CublasStatus(cublasStatus_t status, absl::string_view function) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const auto text = absl::StrCat(function, ": ", Library()->cublasGetStatusName(status));
  return status == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(text)
                                              : absl::InternalError(text);
}

template <typename T>
constexpr cudaDataType kType = std::is_same_v<T, float>      ? CUDA_R_32F
                               : std::is_same_v<T, BFloat16> ? CUDA_R_16BF
                                                             : CUDA_R_16F;

// Our rows are cuBLAS's columns, so that it sees every matrix transposed.
constexpr cublasOperation_t OperationOf(gemm::Layout layout) {
  return layout == gemm::Layout::kPlain ? CUBLAS_OP_N : CUBLAS_OP_T;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Cublas>> Cublas::Create(int device) {
  constexpr char kName[] = "cuBLAS";
  MOE_RETURN_IF_ERROR(Library().status());
  MOE_ASSIGN_OR_RETURN(MemoryResource* const memory, CudaMemory(device));
  // Makes the device current; the handle belongs to the current device.
  MOE_ASSIGN_OR_RETURN(Buffer workspace,
                       Buffer::Allocate(kWorkspaceBytes, *memory, "workspace of cuBLAS"));
  cublasHandle_t handle = nullptr;
  MOE_RETURN_IF_ERROR(CublasStatus(Library()->cublasCreate_v2(&handle), kName));
  std::unique_ptr<Cublas> made(new Cublas(handle, device, std::move(workspace)));
  // Sums that several blocks share are not rounded to the output's type before they are complete.
  MOE_RETURN_IF_ERROR(CublasStatus(
      Library()->cublasSetMathMode(
          handle, static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH |
                                            CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)),
      kName));
  return made;
}

Cublas::~Cublas() {
  Library()->cublasDestroy_v2(static_cast<cublasHandle_t>(handle_));
}

// Transposed, c = a * b is c' = b' * a'.
template <typename T, typename TOut>
absl::Status Cublas::Multiply(absl::string_view function, const gemm::Problem<T, TOut>& problem,
                              Stream& stream) {
  if (stream.device().kind != DeviceKind::kCuda || stream.device().index != device_) {
    return absl::InvalidArgumentError(absl::StrCat(function, ": cuBLAS of CUDA device ", device_,
                                                   " is given a stream of another device"));
  }
  const MatrixView<const T> a = problem.a, b = problem.b;
  const MatrixView<TOut> c = problem.c;
  if (c.rows() == 0 || c.cols() == 0) return absl::OkStatus();
  const auto handle = static_cast<cublasHandle_t>(handle_);
  const Functions& library = *Library();
  const float one = 1, old = problem.write == Write::kAdd ? 1 : 0;
  return stream.Launch([&](void* native) {
    MOE_RETURN_IF_ERROR(CublasStatus(
        library.cublasSetStream_v2(handle, static_cast<cudaStream_t>(native)), function));
    // Setting a stream resets the workspace.
    MOE_RETURN_IF_ERROR(
        CublasStatus(library.cublasSetWorkspace_v2(handle, workspace_.data(),
                                                   static_cast<size_t>(workspace_.bytes())),
                     function));
    return CublasStatus(library.cublasGemmEx_64(
                            handle, OperationOf(problem.b_layout), OperationOf(problem.a_layout),
                            c.cols(), c.rows(), problem.depth(), &one, b.data(), kType<T>,
                            b.stride(), a.data(), kType<T>, a.stride(), &old, c.data(), kType<TOut>,
                            c.stride(), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                        function);
  });
}

#else

absl::StatusOr<std::unique_ptr<Cublas>> Cublas::Create(int) {
  return absl::UnimplementedError(
      "cuBLAS: none in this build: configure where CUDA and cublas_v2.h are, or do without it: "
      "--grouped-gemm mma");
}
Cublas::~Cublas() = default;

template <typename T, typename TOut>
absl::Status Cublas::Multiply(absl::string_view, const gemm::Problem<T, TOut>&, Stream&) {
  return Create(device_).status();
}

#endif

#define MOE_INSTANTIATE(T, TOut) \
  template absl::Status Cublas::Multiply(absl::string_view, const gemm::Problem<T, TOut>&, Stream&);
MOE_FOR_PRODUCTS(MOE_INSTANTIATE)
#undef MOE_INSTANTIATE

template <typename T>
absl::StatusOr<bool> TakesCublas(absl::string_view function, const GemmOptions& options,
                                 size_t groups, int64_t depth) {
  if (options.kernel == GroupedGemmKernel::kCublas && options.cublas == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat(function, ": GroupedGemmKernel::kCublas without GemmOptions::cublas"));
  }
  if (depth == 0 || options.kernel == GroupedGemmKernel::kMma) return false;
  if (options.kernel == GroupedGemmKernel::kCublas) return true;
  return options.cublas != nullptr && groups == 1 && !std::is_same_v<T, float>;
}

MOE_INSTANTIATE_FOR_STORAGE(TakesCublas)

absl::StatusOr<std::unique_ptr<Cublas>> MakeCublas(GroupedGemmKernel kernel, RowBits rows,
                                                   Device device) {
  if (kernel == GroupedGemmKernel::kMma) return nullptr;
  const bool demanded = kernel == GroupedGemmKernel::kCublas;
  if (rows == RowBits::kIndependent) {
    if (!demanded) return nullptr;
    return absl::InvalidArgumentError(
        "--grouped-gemm cublas: the bits of a row depend on the number of rows, which "
        "layout-invariant numerics rule out: expected auto or mma");
  }
  if (device.kind == DeviceKind::kCpu) {
    if (!demanded) return nullptr;
    return absl::InvalidArgumentError("--grouped-gemm cublas: computes on CUDA devices alone");
  }
  absl::StatusOr<std::unique_ptr<Cublas>> made = Cublas::Create(device.index);
  if (!demanded && absl::IsUnimplemented(made.status())) return nullptr;
  return made;
}

}  // namespace moe
