// Copies between ranks' buffers.
#ifndef MOE_COMM_COPY_H_
#define MOE_COMM_COPY_H_

#include <cstdint>

namespace moe {

enum class CopyHint : uint8_t {
  kCached,    // the destination is read soon, or small
  kStreamed,  // the destination does not fit in the cache anyway: write past it where the CPU can
};

// As memcpy; n >= 0; from and to the same address is a no-op; pointers may be null when n is 0.
void CopyBytes(void* to, const void* from, int64_t n, CopyHint hint = CopyHint::kCached);

}  // namespace moe

#endif  // MOE_COMM_COPY_H_
