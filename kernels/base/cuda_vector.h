// Accesses of 16 bytes, and loops of lanes over the columns of a row, the rows of a matrix, and one
// or several arrays.
#ifndef MOE_KERNELS_BASE_CUDA_VECTOR_H_
#define MOE_KERNELS_BASE_CUDA_VECTOR_H_

#include <cstdint>
#include <type_traits>

#include "kernels/base/cuda_kernel.h"
#include "kernels/base/dtype.h"

namespace moe::cuda {

constexpr int kVectorBytes = 16;

// Neighbouring elements of a row: kWidth * sizeof(T) bytes are one access.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Elements {
  T at[kWidth];
};

template <typename T>
constexpr int kVectorWidth = kVectorBytes / static_cast<int>(sizeof(T));

// `p` must be aligned to the access: a GPU stops the kernel otherwise.
template <int kWidth, typename T>
__device__ inline void CheckAligned([[maybe_unused]] const T* p,
                                    [[maybe_unused]] const char* access) {
#if !defined(__CUDACC__)
  if (reinterpret_cast<uintptr_t>(p) % sizeof(Elements<T, kWidth>) != 0) {
    cusim::KernelFault("misaligned vector access", access, {__FILE__, __LINE__});
  }
#endif
}

// `p` must be an address of global memory: a GPU writes elsewhere otherwise.
__device__ inline void CheckGlobal([[maybe_unused]] const void* p) {
#if !defined(__CUDACC__)
  if (const char* const memory = cusim::OtherThanGlobal(p); memory != nullptr) {
    cusim::KernelFault("store beside global memory", memory, {__FILE__, __LINE__});
  }
#endif
}

template <int kWidth, typename T>
__device__ inline Elements<T, kWidth> Load(const T* p) {
  CheckAligned<kWidth>(p, "Load");
  return *reinterpret_cast<const Elements<T, kWidth>*>(p);
}

// Load<kWidth>(p) from global memory, or zeros if p is nullptr. nvcc takes the elements of a load
// in a branch apart where the branch ends, and waits for them there; 16 bytes of this one stay
// under way.
template <int kWidth, typename T>
__device__ inline Elements<T, kWidth> LoadOrZeros(const T* p) {
  using Vector = Elements<T, kWidth>;
#if defined(__CUDACC__)
  const auto from = __cvta_generic_to_global(p);
  const int exists = p != nullptr;
  if constexpr (sizeof(Vector) == sizeof(uint4)) {
    uint4 v;
    asm volatile(
        "{ .reg .pred exists; setp.ne.b32 exists, %5, 0;\n"
        "mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
        "@exists ld.global.v4.b32 {%0, %1, %2, %3}, [%4]; }"
        : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
        : "l"(from), "r"(exists));
    return __builtin_bit_cast(Vector, v);
  }
#endif
  return p == nullptr ? Vector() : Load<kWidth>(p);
}

// Stores to global memory. nvcc splits the copy of a structure, even of CUDA's own vectors, into
// elements where it chooses; PTX of 16 or 8 bytes stays one access.
template <int kWidth, typename T>
__device__ inline void Store(const Elements<T, kWidth>& values, T* p) {
  CheckAligned<kWidth>(p, "Store");
  CheckGlobal(p);
  using Vector = Elements<T, kWidth>;
#if defined(__CUDACC__)
  if constexpr (sizeof(Vector) == sizeof(uint4)) {
    const auto v = __builtin_bit_cast(uint4, values);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
                 "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
    return;
  } else if constexpr (sizeof(Vector) == sizeof(uint2)) {
    const auto v = __builtin_bit_cast(uint2, values);
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x),
                 "r"(v.y)
                 : "memory");
    return;
  }
#endif
  *reinterpret_cast<Vector*>(p) = values;
}

// *p, or 0 if there is no such element. Without a branch, after which the compiler could move what
// it loads to other registers.
__device__ inline float LoadIf(bool there, const float* p) {
#if defined(__CUDACC__)
  float value = 0;
  asm volatile("{\n.reg .pred there;\nsetp.ne.b32 there, %1, 0;\n@there ld.global.f32 %0, [%2];\n}"
               : "+f"(value)
               : "r"(there ? 1 : 0), "l"(__cvta_generic_to_global(p))
               : "memory");
  return value;
#else
  return there ? *p : 0.0f;
#endif
}

// T(x) and float(x) where the payload of a NaN does not matter: x is, or goes into, a result of
// arithmetic, whose NaNs all have one on a GPU. That takes one instruction, T(x) seven for
// bfloat16.
template <typename T>
__device__ inline T RoundTo(float x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, BFloat16>) {
    BFloat16 result;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
    return result;
  }
#endif
  return T(x);
}
template <typename T>
__device__ inline float ToFloat(T x) {
#if defined(__CUDACC__)
  if constexpr (std::is_same_v<T, Float16>) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
  }
#endif
  return static_cast<float>(x);
}

// kWidth neighbouring elements, in accesses of at most 16 bytes.
template <int kWidth, typename T>
__device__ inline Elements<T, kWidth> LoadElements(const T* p) {
  constexpr int kPiece = Min(kWidth, kVectorWidth<T>);
  Elements<T, kWidth> values;
  for (int i = 0; i < kWidth; i += kPiece) {
    const auto piece = Load<kPiece>(p + i);
    for (int j = 0; j < kPiece; ++j) values.at[i + j] = piece.at[j];
  }
  return values;
}

template <int kWidth, typename T>
__device__ inline void StoreElements(const Elements<T, kWidth>& values, T* p) {
  constexpr int kPiece = Min(kWidth, kVectorWidth<T>);
  for (int i = 0; i < kWidth; i += kPiece) {
    Elements<T, kPiece> piece;
    for (int j = 0; j < kPiece; ++j) piece.at[j] = values.at[i + j];
    Store(piece, p + i);
  }
}

// Stores to shared memory.
template <int kWidth, typename T>
__device__ inline void StoreShared(const Elements<T, kWidth>& values, T* p) {
  CheckAligned<kWidth>(p, "StoreShared");
  *reinterpret_cast<Elements<T, kWidth>*>(p) = values;
}

// Whether every row begins at a multiple of `bytes`.
template <typename T>
__device__ bool RowsAlignedTo(MatrixView<T> m, int bytes) {
  return (reinterpret_cast<uintptr_t>(m.data()) | static_cast<uintptr_t>(m.stride()) * sizeof(T)) %
             bytes ==
         0;
}

// How many of a row's n columns can be accessed in whole vectors of T: none unless each row begins
// at a multiple of 16 bytes.
template <typename T, typename... Rows>
__device__ inline int64_t VectorColumns(int64_t n, const Rows*... rows) {
  const uintptr_t together = (uintptr_t{0} | ... | reinterpret_cast<uintptr_t>(rows));
  return together % kVectorBytes == 0 ? n - n % kVectorWidth<T> : 0;
}

template <int kWidth>
struct Width {
  static constexpr int value = kWidth;
};

// The `lanes` threads that share a row call f(column, Width<kVectorWidth<T>>) for its vectors and
// f(column, Width<1>) for the remaining columns. Neighbouring lanes take neighbouring vectors.
template <typename T, typename Function>
__device__ inline void ForColumns(int64_t n, int64_t vector_columns, int lane, int lanes,
                                  Function f) {
  constexpr int kWidth = kVectorWidth<T>;
  for (int64_t c = int64_t{lane} * kWidth; c < vector_columns; c += int64_t{lanes} * kWidth) {
    f(c, Width<kWidth>());
  }
  for (int64_t c = vector_columns + lane; c < n; c += lanes) f(c, Width<1>());
}

// ForColumns with f(column, width) = write(column, width, read(column, width)). kAhead vectors are
// read before the first of them is written, which keeps as many loads in flight; each takes the
// registers of a result of `read`. `read` writes no memory.
template <typename T, int kAhead, typename Read, typename Write>
__device__ inline void ForColumns(int64_t n, int64_t vector_columns, int lane, int lanes, Read read,
                                  Write write) {
  constexpr Width<kVectorWidth<T>> kVector;
  const int64_t step = int64_t{lanes} * kVector.value;
  int64_t c = int64_t{lane} * kVector.value;
  for (; c + (kAhead - 1) * step < vector_columns; c += kAhead * step) {
    decltype(read(c, kVector)) values[kAhead];
    MOE_UNROLL
    for (int i = 0; i < kAhead; ++i) values[i] = read(c + i * step, kVector);
    MOE_UNROLL
    for (int i = 0; i < kAhead; ++i) write(c + i * step, kVector, values[i]);
  }
  MOE_NO_UNROLL
  for (; c < vector_columns; c += step) write(c, kVector, read(c, kVector));
  for (c = vector_columns + lane; c < n; c += lanes) write(c, Width<1>(), read(c, Width<1>()));
}

// The `write` that stores in a row the elements that `read` returned.
template <typename T>
struct StoreTo {
  T* row;
  template <int kWidth>
  __device__ void operator()(int64_t column, Width<kWidth>, const Elements<T, kWidth>& v) const {
    Store(v, row + column);
  }
};
template <typename T>
StoreTo(T*) -> StoreTo<T>;

// Vectors to read ahead where a row is in one array, and in several.
constexpr int kReadAhead = 4, kReadAheadOfMany = 2;

// A grid-stride loop over rows, `kLanes` (a power of two, at most 32) neighbouring lanes a row:
// f(row, lane). The lanes of one row stay together, those of a warp may not.
template <int kLanes, typename Function>
__device__ inline void ForRows(int64_t rows, Function f) {
  static_assert(kLanes <= kWarpLanes && (kLanes & (kLanes - 1)) == 0);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t step = int64_t{gridDim.x} * blockDim.x / kLanes;
  for (int64_t row = thread / kLanes; row < rows; row += step) {
    f(row, static_cast<int>(thread % kLanes));
  }
}

// The launch shape of ForRows<kLanes>. Such kernels have __launch_bounds__(kRowThreads,
// kRowBlocks): 3 blocks must fit a multiprocessor, which leaves a thread 80 registers. By default
// ptxas aims at 64 or 32 and spills.
constexpr int kRowThreads = 256;
constexpr int kRowBlocks = 3;
template <int kLanes>
LaunchShape RowShape(int64_t rows) {
  return {dim3(GridBlocks(rows, kRowThreads / kLanes)), dim3(kRowThreads)};
}

// Columns of a block, one thread each, for sums down the rows in a fixed order. Blocks are small:
// columns are few, and more blocks occupy more of the GPU.
constexpr int kColumnThreads = 64;
inline LaunchShape ColumnShape(int64_t columns) {
  return {dim3(static_cast<unsigned>((columns + kColumnThreads - 1) / kColumnThreads)),
          dim3(kColumnThreads)};
}

// A grid-stride loop over n elements of each of `arrays`: f(i, Width<kVectorWidth<T>>) if all of
// them begin at a multiple of 16 bytes (as nullptr does), f(i, Width<1>) for the rest.
template <typename T, typename Function, typename... Arrays>
__device__ inline void ForElements(int64_t n, Function f, const Arrays*... arrays) {
  const auto thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const auto threads = static_cast<int>(gridDim.x * blockDim.x);
  ForColumns<T>(n, VectorColumns<T>(n, arrays...), thread, threads, f);
}

// The launch shape of ForElements<T>.
template <typename T>
LaunchShape ElementShape(int64_t n) {
  return {dim3(GridBlocks(n, int64_t{kRowThreads} * kVectorWidth<T>)), dim3(kRowThreads)};
}

// Many arrays in one launch: a table of slices, each of which covers a range of all elements.

// Elements of a block. The search in the table, a dozen dependent reads, is short beside the
// accesses to that many elements.
constexpr int64_t kSliceElements = int64_t{1} << 13;

// Slices have first and size: elements [first, first + size), ascending. Block i owns
// kSliceElements elements from origin + i * kSliceElements on. It calls f(slice, begin, n) for its
// share of each slice, n elements from the slice's element `begin` on. All threads of the block
// call f.
template <class Slice, typename Function>
__device__ inline void ForSlices(const Slice* slices, int64_t count, int64_t origin, Function f) {
  const int64_t begin = origin + int64_t{blockIdx.x} * kSliceElements, end = begin + kSliceElements;
  int64_t at = LastStartedBy(begin, count, [&](int64_t i) { return slices[i].first; });
  for (; at < count; ++at) {
    const Slice slice = slices[at];
    if (slice.first >= end) return;
    const int64_t from = slice.first < begin ? begin - slice.first : 0;
    const int64_t to = Min(slice.size, end - slice.first);
    if (from < to) f(slice, from, to - from);
  }
}

// The launch shape of ForSlices for elements [origin, end), at least one.
inline LaunchShape SliceShape(int64_t origin, int64_t end) {
  const int64_t blocks = (end - origin + kSliceElements - 1) / kSliceElements;
  return {dim3(static_cast<unsigned>(blocks)), dim3(kRowThreads)};
}

}  // namespace moe::cuda

#endif  // MOE_KERNELS_BASE_CUDA_VECTOR_H_
