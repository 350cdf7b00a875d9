// The CPU path of router_loss.h, and what its callers prepare on the host.
#ifndef MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_
#define MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_

#include <cstddef>
#include <cstdint>

#include <absl/container/inlined_vector.h>
#include <absl/types/span.h>

#include "kernels/base/parallel.h"
#include "kernels/router_loss/loss_terms.h"

namespace moe::router_loss {

// Units, or blocks, whose numbers need no memory from the heap.
inline constexpr size_t kMostInline = 64;

// The arrays of TokenBlocks, in memory of the host.
struct HostBlocks {
  TokenBlocks view() const;

  absl::InlinedVector<int64_t, kMostInline> begin, unit, first_block;
};
// Cuts units [offsets[u], offsets[u + 1]) of tokens.
HostBlocks CutIntoBlocks(absl::Span<const int64_t> offsets);

void Run(const Balance& balance, ThreadPool& threads);
void Run(const ZLoss& z, ThreadPool& threads);
void Run(const Entropy& entropy, ThreadPool& threads);

}  // namespace moe::router_loss

#endif  // MOE_KERNELS_ROUTER_LOSS_ROUTER_LOSS_CPU_H_
