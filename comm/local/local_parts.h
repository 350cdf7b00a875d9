// A rank's share of a collective, done in parts: what its peers see of it while they wait.
#ifndef MOE_COMM_LOCAL_LOCAL_PARTS_H_
#define MOE_COMM_LOCAL_LOCAL_PARTS_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include <absl/functional/function_ref.h>

#include "comm/copy.h"
#include "comm/local/local_group.h"

namespace moe {

// work(begin, end) over [0, n), `part` at a time, each of which is progress of the caller's rank.
inline void InParts(LocalGroup& group, const LocalCaller& caller, int64_t n, int64_t part,
                    absl::FunctionRef<void(int64_t, int64_t)> work) {
  for (int64_t begin = 0; begin < n; begin += part) {
    work(begin, std::min(n, begin + part));
    group.Progressed(caller);
  }
}

// Even a disk that swaps copies it well within a deadline of a second.
inline constexpr int64_t kPartBytes = int64_t{16} << 20;

inline void CopyInParts(LocalGroup& group, const LocalCaller& caller, void* to, const void* from,
                        int64_t bytes, CopyHint hint = CopyHint::kCached) {
  InParts(group, caller, bytes, kPartBytes, [&](int64_t begin, int64_t end) {
    CopyBytes(static_cast<std::byte*>(to) + begin, static_cast<const std::byte*>(from) + begin,
              end - begin, hint);
  });
}

}  // namespace moe

#endif  // MOE_COMM_LOCAL_LOCAL_PARTS_H_
