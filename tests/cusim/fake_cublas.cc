// The functions of cuBLAS that this project calls, on a CPU, in streams of the fake runtime: a
// build with MOE_ENABLE_CUDA=SIMULATED links them in place of the library.
//
// Plain loops that sum in float32, in ascending order. Strict where the library is lenient or
// unspecified: the following are printed and abort the process: a matrix outside the handle's
// device, a leading dimension below its column's length, types that do not match, a product without
// terms, a missing workspace (results could then depend on other streams), and a device other than
// the handle's.
#include <algorithm>
#include <atomic>
#include <string>

#include "tests/cusim/cusim.h"

#if __has_include(<cublas_v2.h>)

#include <cublas_v2.h>

#include "kernels/base/dtype.h"
#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

struct cublasContext {
  int device;
  cudaStream_t stream = nullptr;
  bool has_workspace = false;
};

namespace {

using cusim::Misuse;

constexpr char kGemm[] = "cublasGemmEx_64";

std::atomic<int64_t> products = 0;

// A matrix, stored by columns; `operation` of it is op(matrix): [rows, cols].
struct Matrix {
  const char* name;
  void* data;
  cudaDataType type;
  int64_t leading_dimension;
  cublasOperation_t operation;
  int64_t rows, cols;

  bool transposed() const { return operation == CUBLAS_OP_T; }
  int64_t Index(int64_t row, int64_t col) const {
    return transposed() ? row * leading_dimension + col : col * leading_dimension + row;
  }
  float Get(int64_t row, int64_t col) const {
    if (type == CUDA_R_32F) return static_cast<const float*>(data)[Index(row, col)];
    if (type == CUDA_R_16F) return Widened<moe::Float16>(Index(row, col));
    return Widened<moe::BFloat16>(Index(row, col));
  }
  void Set(int64_t row, int64_t col, float value) const {
    if (type == CUDA_R_32F) {
      static_cast<float*>(data)[Index(row, col)] = value;
    } else if (type == CUDA_R_16F) {
      static_cast<moe::Float16*>(data)[Index(row, col)] = moe::Float16(value);
    } else {
      static_cast<moe::BFloat16*>(data)[Index(row, col)] = moe::BFloat16(value);
    }
  }

 private:
  template <typename T>
  float Widened(int64_t index) const {
    return static_cast<float>(static_cast<const T*>(data)[index]);
  }
};

// Checks that `bytes` bytes at `data` are memory of the device.
void CheckPlace(const char* function, const std::string& name, const void* data, size_t bytes,
                int device) {
  if (cusim::DeviceOfMemory(data) != device) {
    Misuse(function, name + " is no memory of the handle's device");
  }
  cusim::CheckDeviceRange(function, data, bytes);
}

void Check(const Matrix& m, int device) {
  const std::string name = m.name;
  if (m.operation != CUBLAS_OP_N && m.operation != CUBLAS_OP_T) {
    Misuse(kGemm, "operation " + std::to_string(m.operation) + " on " + name);
  }
  const int64_t column = m.transposed() ? m.cols : m.rows;
  const int64_t columns = m.transposed() ? m.rows : m.cols;
  if (m.leading_dimension < std::max<int64_t>(1, column)) {
    Misuse(kGemm, "ld" + name + " is " + std::to_string(m.leading_dimension) + ", below " +
                      std::to_string(column));
  }
  const size_t element = m.type == CUDA_R_32F ? sizeof(float) : sizeof(moe::BFloat16);
  if (reinterpret_cast<uintptr_t>(m.data) % element != 0) Misuse(kGemm, name + " is misaligned");
  const auto elements = static_cast<size_t>((columns - 1) * m.leading_dimension + column);
  CheckPlace(kGemm, name, m.data, elements * element, device);
}

void CheckTypes(cudaDataType a, cudaDataType b, cudaDataType c, cublasComputeType_t compute) {
  const bool singles = a == CUDA_R_32F && c == CUDA_R_32F;
  const bool halves = (a == CUDA_R_16BF || a == CUDA_R_16F) && (c == a || c == CUDA_R_32F);
  if (a == b && (singles || halves) && compute == CUBLAS_COMPUTE_32F) return;
  Misuse(kGemm, "types " + std::to_string(a) + ", " + std::to_string(b) + ", " + std::to_string(c) +
                    " in compute type " + std::to_string(compute));
}

void CheckDevice(const char* function, cublasHandle_t handle) {
  int current = -1;
  cudaGetDevice(&current);
  if (current != handle->device) Misuse(function, "the current device is not the handle's");
}

}  // namespace

namespace cusim {

int64_t CublasProducts() {
  return products;
}

}  // namespace cusim

extern "C" {

const char* CUBLASWINAPI cublasGetStatusName(cublasStatus_t status) {
  return status == CUBLAS_STATUS_NOT_INITIALIZED ? "CUBLAS_STATUS_NOT_INITIALIZED"
                                                 : "a status that the fake has no name for";
}

cublasStatus_t CUBLASWINAPI cublasCreate_v2(cublasHandle_t* handle) {
  int device = -1;
  if (cudaGetDevice(&device) != cudaSuccess) return CUBLAS_STATUS_NOT_INITIALIZED;
  *handle = new cublasContext{.device = device};
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasDestroy_v2(cublasHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasSetStream_v2(cublasHandle_t handle, cudaStream_t stream) {
  if (cusim::Streams::Get().DeviceOf(__func__, stream) != handle->device) {
    Misuse(__func__, "a stream of another device than the handle's");
  }
  handle->stream = stream;
  handle->has_workspace = false;  // as cuBLAS documents
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasSetWorkspace_v2(cublasHandle_t handle, void* data, size_t bytes) {
  CheckPlace(__func__, "the workspace", data, bytes, handle->device);
  if (reinterpret_cast<uintptr_t>(data) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  handle->has_workspace = true;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t CUBLASWINAPI cublasSetMathMode(cublasHandle_t, cublasMath_t mode) {
  if ((mode & CUBLAS_TF32_TENSOR_OP_MATH) == CUBLAS_TF32_TENSOR_OP_MATH) {
    Misuse(__func__, "TF32, which keeps 10 bits of float32");
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t CUBLASWINAPI cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t a_operation,
                                            cublasOperation_t b_operation, int64_t m, int64_t n,
                                            int64_t k, const void* alpha, const void* a,
                                            cudaDataType a_type, int64_t lda, const void* b,
                                            cudaDataType b_type, int64_t ldb, const void* beta,
                                            void* c, cudaDataType c_type, int64_t ldc,
                                            cublasComputeType_t compute, cublasGemmAlgo_t) {
  CheckDevice(kGemm, handle);
  if (handle->stream == nullptr || !handle->has_workspace) {
    Misuse(kGemm, "no stream, or no workspace since the stream was set");
  }
  if (m <= 0 || n <= 0 || k <= 0) Misuse(kGemm, "a product without elements or without terms");
  CheckTypes(a_type, b_type, c_type, compute);
  const Matrix left = {"a", const_cast<void*>(a), a_type, lda, a_operation, m, k};
  const Matrix right = {"b", const_cast<void*>(b), b_type, ldb, b_operation, k, n};
  const Matrix out = {"c", c, c_type, ldc, CUBLAS_OP_N, m, n};
  const int device = handle->device;
  for (const Matrix& matrix : {left, right, out}) Check(matrix, device);
  const float scale = *static_cast<const float*>(alpha), keep = *static_cast<const float*>(beta);
  cusim::Streams::Get().Enqueue(kGemm, handle->stream, [=] {
    for (const Matrix& matrix : {left, right, out}) Check(matrix, device);
    for (int64_t col = 0; col < n; ++col) {
      for (int64_t row = 0; row < m; ++row) {
        float sum = 0;
        for (int64_t i = 0; i < k; ++i) sum += left.Get(row, i) * right.Get(i, col);
        // The old value of c is not read, even if it is NaN, unless it is kept.
        out.Set(row, col, keep == 0 ? scale * sum : scale * sum + keep * out.Get(row, col));
      }
    }
  });
  ++products;
  return CUBLAS_STATUS_SUCCESS;
}

}  // extern "C"

#else

int64_t cusim::CublasProducts() {
  return 0;
}

#endif
