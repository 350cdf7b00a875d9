#include "kernels/base/cuda_kernel.h"
#include "kernels/expert_sort/expert_rows_cuda.h"

namespace moe::expert_sort {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kThreads = 256;

// Calls visit(t): a thread owns a token.
template <typename Visit>
__device__ void ForTokens(int64_t tokens, Visit visit) {
  for (int64_t t = int64_t{blockIdx.x} * kThreads + threadIdx.x; t < tokens;
       t += int64_t{gridDim.x} * kThreads) {
    visit(t);
  }
}

// A thread owns a token, and looks at its earlier slots for each.
__global__ void __launch_bounds__(kThreads) SlotGroupsKernel(CudaSlotGroups s) {
  ForTokens(s.tokens, [&](int64_t t) {
    const auto group_of = [&](int64_t slot) {
      const int32_t expert = s.expert[slot];
      if (expert < 0 || expert >= s.num_experts) return -1;
      return s.dropped != nullptr && s.dropped[slot] != 0 ? -1 : s.group_of_expert[expert];
    };
    const int64_t first = s.slot_offset[t], end = s.slot_offset[t + 1];
    for (int64_t slot = first; slot < end; ++slot) {
      const int32_t group = group_of(slot);
      int64_t other = first;
      while (other < slot && group_of(other) != group) ++other;
      s.first_group[slot] = other == slot ? group : -1;
    }
  });
}

// A thread owns a token, and looks for the slot with which it was sent to each slot's group.
__global__ void __launch_bounds__(kThreads) SentPlacesKernel(CudaSentPlaces p) {
  ForTokens(p.tokens, [&](int64_t t) {
    const int64_t first = p.slot_offset[t], end = p.slot_offset[t + 1];
    for (int64_t slot = first; slot < end; ++slot) {
      const int32_t row = p.row_of_slot[slot];
      if (row < 0) continue;
      const int32_t group = p.group_of_expert[p.expert[slot]];
      int64_t sent = first;
      while (sent < slot && p.first_group[sent] != group) ++sent;
      p.place[row] = static_cast<int32_t>(p.sent_row[sent] - p.group_begin[group]);
    }
  });
}

// Blocks of one x own a run, a thread some of its rows.
__global__ void __launch_bounds__(kThreads) ExpertRowsKernel(CudaExpertRows r) {
  const ExpertRun run = r.runs[blockIdx.x];
  for (int64_t row = int64_t{blockIdx.y} * kThreads + threadIdx.x; row < run.rows;
       row += int64_t{gridDim.y} * kThreads) {
    const auto i = static_cast<int32_t>(row);
    r.return_order[run.return_row + i] = run.expert_row + i;
    r.return_place[run.expert_row + i] = run.return_row - run.chunk_row + i;
    if (r.received == nullptr) continue;
    int32_t place = Min(r.received[run.received + i], run.source_rows - 1);  // a peer sent it
    if (place < 0) place = 0;
    r.source[run.expert_row + i] = run.source_row + place;
  }
}

}  // namespace

cudaError_t Run(const CudaSlotGroups& slots, cudaStream_t stream) {
  if (slots.tokens == 0) return cudaSuccess;
  return Launch(&SlotGroupsKernel, {dim3(GridBlocks(slots.tokens, kThreads)), dim3(kThreads)},
                stream, slots);
}

cudaError_t Run(const CudaSentPlaces& places, cudaStream_t stream) {
  if (places.tokens == 0) return cudaSuccess;
  return Launch(&SentPlacesKernel, {dim3(GridBlocks(places.tokens, kThreads)), dim3(kThreads)},
                stream, places);
}

cudaError_t Run(const CudaExpertRows& rows, cudaStream_t stream) {
  if (rows.num_runs == 0 || rows.most_rows == 0) return cudaSuccess;
  constexpr unsigned kMostBlocks = 64;  // of a run
  const dim3 grid(static_cast<unsigned>(rows.num_runs),
                  Min(GridBlocks(rows.most_rows, kThreads), kMostBlocks));
  return Launch(&ExpertRowsKernel, {grid, dim3(kThreads)}, stream, rows);
}

}  // namespace moe::expert_sort
