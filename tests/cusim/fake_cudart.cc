// The functions of the CUDA runtime that this project calls, on a CPU: a build with
// MOE_ENABLE_CUDA=SIMULATED links them in place of CUDA's own. fake_streams.h lists what they find.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <set>
#include <utility>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "tests/cusim/async_proxy.h"
#include "tests/cusim/fake_memory.h"
#include "tests/cusim/fake_streams.h"

namespace {

using cusim::Streams;
using cusim::TheMachine;

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;
thread_local cusim::HostWaits host_waits;

cudaError_t Return(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

// The error that a call that needs a device returns first.
cudaError_t Driver() {
  return TheMachine().driver;
}

bool IsDevice(int device) {
  return device >= 0 && device < TheMachine().devices;
}

bool CanBePeers(int device, int owner) {
  const auto& never = TheMachine().no_peers;
  return device != owner &&
         std::find(never.begin(), never.end(), std::pair(device, owner)) == never.end();
}

// Pools are numbered by device: all pools of one device are the same.
int DeviceOfPool(cudaMemPool_t pool) {
  return static_cast<int>(reinterpret_cast<intptr_t>(pool) - 1);
}

int DeviceOfStream(const char* function, cudaStream_t stream) {
  return stream == nullptr ? current_device : Streams::Get().DeviceOf(function, stream);
}

// Checks memory that a copy of `device` accesses.
void CheckRange(const char* function, int device, const void* data, size_t bytes) {
  cusim::CheckDeviceRange(function, data, bytes);
  cusim::CheckAccess(function, device, data);
}

// Whether cudaDeviceEnablePeerAccess is called for this pair for the first time. It only opens
// memory of cudaMalloc, which the library does not use, and no pool.
bool EnablePeer(int device, int owner) {
  static std::mutex* const mu = new std::mutex;
  static auto* const enabled = new std::set<std::pair<int, int>>;  // guarded by mu
  const std::lock_guard<std::mutex> lock(*mu);
  return enabled->insert({device, owner}).second;
}

bool IsMultiple(uint64_t n, uint64_t of) {
  return n % of == 0;
}

// The driver's cuTensorMapEncodeTiled. Refuses what the driver refuses, and also what no kernel
// here needs: element types of other than 16 bits, other than three dimensions, element strides,
// rows of a box that are not the 128 bytes of the one swizzle.
CUresult CUDAAPI EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank,
                             void* data, const cuuint64_t* size, const cuuint64_t* stride,
                             const cuuint32_t* box, const cuuint32_t* step,
                             CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                             CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  constexpr uint64_t kMostElements = uint64_t{1} << 32, kMostStride = uint64_t{1} << 40;
  constexpr uint32_t kMostBox = 256;
  if (rank != 3 || interleave != CU_TENSOR_MAP_INTERLEAVE_NONE ||
      swizzle != CU_TENSOR_MAP_SWIZZLE_128B || box[0] * 2 != 128 ||
      fill != CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE ||
      (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (!IsMultiple(reinterpret_cast<uintptr_t>(map), 64) || data == nullptr ||
      !IsMultiple(reinterpret_cast<uintptr_t>(data), 16)) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  cusim::TensorMap made = {.magic = cusim::TensorMap::kMagic,
                           .data = static_cast<const uint16_t*>(data),
                           .size = {},
                           .stride = {2, stride[0], stride[1]},
                           .box = {}};
  for (int i = 0; i < 3; ++i) {
    if (size[i] == 0 || size[i] > kMostElements || box[i] == 0 || box[i] > kMostBox ||
        step[i] != 1) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    if (i > 0 && (!IsMultiple(made.stride[i], 16) || made.stride[i] >= kMostStride)) {
      return CUDA_ERROR_INVALID_VALUE;
    }
    made.size[i] = size[i];
    made.box[i] = box[i];
  }
  *map = {};
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}

}  // namespace

cusim::HostWaits cusim::WaitsOfThisThread() {
  return host_waits;
}

extern "C" {

cudaError_t CUDARTAPI cudaGetLastError() {
  const cudaError_t error = last_error;
  last_error = cudaSuccess;
  return error;
}
cudaError_t CUDARTAPI cudaPeekAtLastError() {
  return last_error;
}

const char* CUDARTAPI cudaGetErrorName(cudaError_t error) {
  static constexpr std::pair<cudaError_t, const char*> kNames[] = {
      {cudaSuccess, "cudaSuccess"},
      {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation"},
      {cudaErrorInsufficientDriver, "cudaErrorInsufficientDriver"},
      {cudaErrorNoDevice, "cudaErrorNoDevice"},
      {cudaErrorInvalidDevice, "cudaErrorInvalidDevice"},
      {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice"},
      {cudaErrorIllegalAddress, "cudaErrorIllegalAddress"},
      {cudaErrorPeerAccessAlreadyEnabled, "cudaErrorPeerAccessAlreadyEnabled"},
      {cudaErrorPeerAccessUnsupported, "cudaErrorPeerAccessUnsupported"},
  };
  for (const auto& [named, name] : kNames) {
    if (named == error) return name;
  }
  return "an error that the fake runtime has no name for";
}
const char* CUDARTAPI cudaGetErrorString(cudaError_t) {
  return "simulated";
}

cudaError_t CUDARTAPI cudaGetDeviceCount(int* count) {
  if (Driver() != cudaSuccess) return Return(Driver());  // *count stays unchanged, as with CUDA
  *count = TheMachine().devices;
  return *count > 0 ? cudaSuccess : Return(cudaErrorNoDevice);
}
cudaError_t CUDARTAPI cudaGetDevice(int* device) {
  *device = current_device;
  return Return(Driver());
}
cudaError_t CUDARTAPI cudaSetDevice(int device) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (!IsDevice(device)) return Return(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (!IsDevice(device)) return Return(cudaErrorInvalidDevice);
  *properties = {};
  std::strcpy(properties->name, "simulated GPU");
  properties->totalGlobalMem = TheMachine().memory_bytes;
  properties->major = TheMachine().major;
  properties->minor = TheMachine().minor;
  properties->multiProcessorCount = TheMachine().multiprocessors;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (!IsDevice(device)) return Return(cudaErrorInvalidDevice);
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
      *value = TheMachine().major;
      return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor:
      *value = TheMachine().minor;
      return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = static_cast<int>(cusim::MostSharedBytes(TheMachine()));
      return cudaSuccess;
    case cudaDevAttrMultiProcessorCount:
      *value = TheMachine().multiprocessors;
      return cudaSuccess;
    default:
      return Return(cudaErrorNotSupported);
  }
}
cudaError_t CUDARTAPI cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  return Return(Driver() != cudaSuccess ? Driver() : TheMachine().kernel_image);
}
cudaError_t CUDARTAPI cudaMemGetInfo(size_t* free, size_t* total) {
  if (Driver() != cudaSuccess) return Return(Driver());
  *total = TheMachine().memory_bytes;
  *free = *total - cusim::UsedDeviceBytes(current_device);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceCanAccessPeer(int* can, int device, int owner) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (!IsDevice(device) || !IsDevice(owner)) return Return(cudaErrorInvalidDevice);
  *can = CanBePeers(device, owner) ? 1 : 0;
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceEnablePeerAccess(int owner, unsigned flags) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (flags != 0) return Return(cudaErrorInvalidValue);
  if (!IsDevice(owner) || owner == current_device) return Return(cudaErrorInvalidDevice);
  if (!CanBePeers(current_device, owner)) return Return(cudaErrorPeerAccessUnsupported);
  if (EnablePeer(current_device, owner)) return cudaSuccess;
  return Return(cudaErrorPeerAccessAlreadyEnabled);
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
  if (Driver() != cudaSuccess) return Return(Driver());
  ++host_waits.synchronizations;
  Streams::Get().SynchronizeAll(__func__);
  return Return(TheMachine().work);
}

cudaError_t CUDARTAPI cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return Return(Driver());
}
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags,
                                                   int priority) {
  if (Driver() != cudaSuccess) return Return(Driver());
  // Blocking streams would be ordered with the null stream, which runs everything at once here.
  if (flags != cudaStreamNonBlocking) return Return(cudaErrorNotSupported);
  *stream = Streams::Get().Create(current_device, priority);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned flags) {
  return cudaStreamCreateWithPriority(stream, flags, 0);
}
cudaError_t CUDARTAPI cudaStreamGetPriority(cudaStream_t stream, int* priority) {
  *priority = Streams::Get().PriorityOf(__func__, stream);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
  Streams::Get().Destroy(__func__, stream);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamGetDevice(cudaStream_t stream, int* device) {
  *device = DeviceOfStream(__func__, stream);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
  ++host_waits.synchronizations;
  if (stream != nullptr) Streams::Get().Synchronize(__func__, stream);
  return Return(TheMachine().work);
}
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
  Streams::Get().Wait(__func__, stream, event);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  Streams::Get().EnqueueHost(__func__, stream, [=] { function(data); });
  return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
  if (Driver() != cudaSuccess) return Return(Driver());
  *event = Streams::Get().CreateEvent(current_device, (flags & cudaEventDisableTiming) == 0);
  return Return(*event == nullptr ? cudaErrorMemoryAllocation : cudaSuccess);
}
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
  Streams::Get().DestroyEvent(__func__, event);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
  Streams& streams = Streams::Get();
  if (streams.DeviceOf(__func__, event) != streams.DeviceOf(__func__, stream)) {
    return Return(cudaErrorInvalidResourceHandle);
  }
  streams.Record(__func__, event, stream);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
  if (Streams::Get().Passed(__func__, event)) return Return(TheMachine().work);
  ++host_waits.synchronizations;
  Streams::Get().Synchronize(__func__, event);
  return Return(TheMachine().work);
}
cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
  return Streams::Get().Passed(__func__, event) ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaEventElapsedTime(float* ms, cudaEvent_t start, cudaEvent_t stop) {
  return Return(Streams::Get().Elapsed(__func__, start, stop, ms));
}

cudaError_t CUDARTAPI cudaMemPoolCreate(cudaMemPool_t* pool, const cudaMemPoolProps* properties) {
  if (Driver() != cudaSuccess) return Return(Driver());
  if (!IsDevice(properties->location.id)) return Return(cudaErrorInvalidDevice);
  *pool = reinterpret_cast<cudaMemPool_t>(static_cast<intptr_t>(properties->location.id + 1));
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemPoolSetAttribute(cudaMemPool_t, cudaMemPoolAttr, void*) {
  return cudaSuccess;
}
// Opens the whole pool, as CUDA does: past and future allocations.
cudaError_t CUDARTAPI cudaMemPoolSetAccess(cudaMemPool_t pool, const cudaMemAccessDesc* accesses,
                                           size_t count) {
  if (Driver() != cudaSuccess) return Return(Driver());
  for (size_t i = 0; i < count; ++i) {
    const int device = accesses[i].location.id;
    if (accesses[i].location.type != cudaMemLocationTypeDevice || !IsDevice(device)) {
      return Return(cudaErrorInvalidDevice);
    }
    if (accesses[i].flags != cudaMemAccessFlagsProtReadWrite) return Return(cudaErrorNotSupported);
    if (!CanBePeers(device, DeviceOfPool(pool))) return Return(cudaErrorInvalidDevice);
    cusim::GrantAccess(device, DeviceOfPool(pool));
  }
  return cudaSuccess;
}
// The memory is valid at once: use before the stream reaches this point is only found on a GPU.
cudaError_t CUDARTAPI cudaMallocFromPoolAsync(void** data, size_t bytes, cudaMemPool_t pool,
                                              cudaStream_t stream) {
  Streams::Get().DeviceOf(__func__, stream);
  *data = cusim::AllocateDevice(DeviceOfPool(pool), bytes);
  return *data != nullptr ? cudaSuccess : Return(cudaErrorMemoryAllocation);
}
cudaError_t CUDARTAPI cudaFreeAsync(void* data, cudaStream_t stream) {
  Streams::Get().Enqueue(__func__, stream, [data] { cusim::FreeDevice("cudaFreeAsync", data); });
  return cudaSuccess;
}
// For programs that allocate by themselves; the library does not call it.
cudaError_t CUDARTAPI cudaMalloc(void** data, size_t bytes) {
  if (Driver() != cudaSuccess) return Return(Driver());
  *data = cusim::AllocateDevice(current_device, bytes);
  return *data != nullptr ? cudaSuccess : Return(cudaErrorMemoryAllocation);
}
cudaError_t CUDARTAPI cudaFree(void* data) {
  Streams::Get().SynchronizeAll(__func__);
  if (data != nullptr) cusim::FreeDevice(__func__, data);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaHostAlloc(void** data, size_t bytes, unsigned) {
  if (Driver() != cudaSuccess) return Return(Driver());
  *data = cusim::AllocatePinned(bytes);
  return *data != nullptr ? cudaSuccess : Return(cudaErrorMemoryAllocation);
}
cudaError_t CUDARTAPI cudaFreeHost(void* data) {
  if (data != nullptr) cusim::FreePinned(__func__, data);
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void* data, int value, size_t bytes, cudaStream_t stream) {
  const int device = DeviceOfStream(__func__, stream);
  Streams::Get().Enqueue(__func__, stream, [=] {
    CheckRange("cudaMemsetAsync", device, data, bytes);
    std::memset(data, value, bytes);
  });
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemset2DAsync(void* data, size_t pitch, int value, size_t width,
                                        size_t height, cudaStream_t stream) {
  if (width > pitch) return Return(cudaErrorInvalidValue);
  for (size_t row = 0; row < height; ++row) {
    cudaMemsetAsync(static_cast<char*>(data) + row * pitch, value, width, stream);
  }
  return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind,
                                      cudaStream_t stream) {
  const int device = DeviceOfStream(__func__, stream);
  if (cusim::DeviceOfMemory(to) < 0 && !cusim::IsPinned(to)) ++host_waits.copies;
  Streams::Get().Enqueue(__func__, stream, [=] {
    CheckRange("cudaMemcpyAsync, from", device, from, bytes);
    CheckRange("cudaMemcpyAsync, to", device, to, bytes);
    std::memcpy(to, from, bytes);
  });
  return cudaSuccess;
}

// Finds the driver's functions, as on a GPU.
cudaError_t CUDARTAPI cudaGetDriverEntryPointByVersion(const char* symbol, void** function,
                                                       unsigned,
                                                       unsigned long long,  // NOLINT: CUDA's types
                                                       cudaDriverEntryPointQueryResult* result) {
  *function = nullptr;
  if (TheMachine().driver != cudaSuccess) return TheMachine().driver;
  const bool found = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  if (found) *function = reinterpret_cast<void*>(&EncodeTiled);
  *result = found ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

}  // extern "C"
