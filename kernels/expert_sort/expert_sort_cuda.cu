#include <limits>

#include "kernels/base/cuda_block_scan.h"
#include "kernels/base/cuda_cub.h"
#include "kernels/base/cuda_kernel.h"
#include "kernels/expert_sort/expert_sort_cuda.h"

namespace moe::expert_sort {
namespace {

using namespace moe::cuda;  // NOLINT(google-build-using-namespace): what kernels are written in

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarpLanes;
// A warp processes neighbouring slots of the chunk, 32 at a time.
constexpr int kWarpSlots = static_cast<int>(kChunkSlots) / kWarps;
constexpr int kSteps = kWarpSlots / kWarpLanes;

// A grid-stride loop, visit(i) for i < n: a thread owns an item.
template <typename Visit>
__device__ void ForThreads(int64_t n, Visit visit) {
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * kThreads) {
    visit(i);
  }
}
LaunchShape ThreadShape(int64_t n) {
  return {dim3(GridBlocks(n, kThreads)), dim3(kThreads)};
}

// The table of counts: for each expert, in the order of their rows, a column a chunk; 0 at the end.
// Later, of all that precedes: the slots of earlier experts, and the expert's own in earlier
// chunks.
__device__ inline int64_t Cell(int expert, int64_t column) {
  return int64_t{expert} * gridDim.x + column;
}

__device__ inline int32_t ExpertAt(const CudaExpertSort& s, int i) {
  return s.order == nullptr ? i : s.order[i];
}

// The slots of a block, and the table columns of its micro-batch.
struct Chunk {
  int64_t begin, end;
  int32_t micro_batch;  // -1: the grid has more blocks than there are chunks
  int32_t first_column, end_column;
};

__device__ inline int64_t SlotsBegin(const CudaExpertSort& s, int micro_batch) {
  return s.slot_offset[s.micro_batch_offsets[micro_batch]];
}

__device__ inline Chunk ChunkOfBlock(const CudaExpertSort& s) {
  MOE_SHARED_ARRAY(Chunk, found, 1);
  if (threadIdx.x == 0) found[0] = {0, 0, -1, 0, 0};
  __syncthreads();
  const auto block = static_cast<int32_t>(blockIdx.x);
  ForPrefixSums<kThreads>(
      s.micro_batches,
      [&](int b) {
        const int64_t slots = SlotsBegin(s, b + 1) - SlotsBegin(s, b);
        const auto chunks = static_cast<int32_t>((slots + kChunkSlots - 1) / kChunkSlots);
        return chunks > 0 ? chunks : 1;
      },
      [&](int b, int32_t first, int32_t chunks) {
        if (block < first || block >= first + chunks) return;
        const int64_t begin = SlotsBegin(s, b) + (block - first) * kChunkSlots;
        const int64_t end = SlotsBegin(s, b + 1);
        found[0] = {begin, begin + kChunkSlots < end ? begin + kChunkSlots : end, b, first,
                    first + chunks};
      });
  __syncthreads();
  return found[0];
}

// expert[i] is that of slot first + i step, below 0 if it is not kept, or not before `end`. All
// slots are read before one is used.
template <int kCount>
__device__ inline void ReadExperts(const CudaExpertSort& s, int64_t first, int step, int64_t end,
                                   int32_t (&expert)[kCount]) {
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    expert[i] = first + i * step < end ? s.expert[first + i * step] : -1;
  }
  if (s.dropped != nullptr) {
    MOE_UNROLL
    for (int i = 0; i < kCount; ++i) {
      if (first + i * step < end && s.dropped[first + i * step] != 0) expert[i] = -1;
    }
  }
  MOE_UNROLL
  for (int i = 0; i < kCount; ++i) {
    if (expert[i] >= s.num_experts) expert[i] = -1;
  }
}

// A block counts the kept slots of its chunk, by expert.
__global__ void __launch_bounds__(kThreads) CountKernel(CudaExpertSort s) {
  MOE_SHARED_ARRAY(int32_t, count, kMaxExperts);
  for (int e = static_cast<int>(threadIdx.x); e < s.num_experts; e += kThreads) count[e] = 0;
  const Chunk chunk = ChunkOfBlock(s);  // synchronises the block
  int32_t expert[kChunkSlots / kThreads];
  ReadExperts(s, chunk.begin + threadIdx.x, kThreads, chunk.end, expert);
  for (const int32_t e : expert) {
    if (e >= 0) atomicAdd(&count[e], 1);
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < s.num_experts; i += kThreads) {
    s.scratch[Cell(i, blockIdx.x)] = count[ExpertAt(s, i)];
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) s.scratch[Cell(s.num_experts, 0)] = 0;
  ForThreads(s.most_rows, [&](int64_t row) { s.slot_of_row[row] = -1; });
}

// A lane's slots: slot i is 32 i after the first.
struct LaneSlots {
  int32_t expert[kSteps];  // below 0: not kept
  int32_t rank[kSteps];    // number of the warp's earlier slots for the same expert
};

// `count` [E] is the warp's own and receives the number of its slots for each expert.
__device__ inline void RankInWarp(const CudaExpertSort& s, LaneSlots& slots, uint16_t* count) {
  const auto lane = threadIdx.x % kWarpLanes;
  for (int e = static_cast<int>(lane); e < s.num_experts; e += kWarpLanes) count[e] = 0;
  __syncwarp();
  MOE_UNROLL
  for (int i = 0; i < kSteps; ++i) {
    const int32_t expert = slots.expert[i];
    const uint32_t same = __match_any_sync(kAllLanes, expert);
    const uint32_t below = same & ((1u << lane) - 1);
    const int32_t before = expert >= 0 ? count[expert] : 0;
    slots.rank[i] = before + __popc(below);
    __syncwarp();  // all lanes have read
    if (expert >= 0 && below == 0) count[expert] = static_cast<uint16_t>(before + __popc(same));
    __syncwarp();
  }
}

// start [E]: the first row of the expert's slots of this micro-batch, or without padding of all its
// slots; place [E]: the number of them in earlier chunks. Also writes this block's part of the
// outputs.
__device__ inline void PlaceExperts(const CudaExpertSort& s, const Chunk& chunk, int32_t* start,
                                    int32_t* place) {
  const int64_t padded = s.micro_batches * s.padded_rows;  // places of one expert
  for (int i = static_cast<int>(threadIdx.x); i < s.num_experts; i += kThreads) {
    const auto sum_before = [&](int64_t column) {
      return s.scratch[Cell(i, column)];
    };
    const int32_t e = ExpertAt(s, i), rows_before = sum_before(0);
    const int64_t begin = padded > 0 ? i * padded : rows_before;
    const int32_t earlier = sum_before(chunk.first_column);  // and in earlier micro-batches
    start[e] = static_cast<int32_t>(begin + chunk.micro_batch * s.padded_rows);
    place[e] = sum_before(blockIdx.x) - (padded > 0 ? earlier : rows_before);
    if (blockIdx.x == 0) {
      s.expert_begin[i] = begin;
      if (i == s.num_experts - 1) {
        const int64_t end = padded > 0 ? begin + padded : sum_before(gridDim.x);
        s.expert_begin[i + 1] = end;
        s.segment_begin[int64_t{i + 1} * s.micro_batches] = end;
      }
    }
    if (static_cast<int32_t>(blockIdx.x) != chunk.first_column) continue;
    s.segment_begin[int64_t{i} * s.micro_batches + chunk.micro_batch] =
        padded > 0 ? begin + chunk.micro_batch * s.padded_rows : earlier;
    s.count[int64_t{chunk.micro_batch} * s.num_experts + e] =
        sum_before(chunk.end_column) - earlier;
  }
}

// A block assigns rows to the slots of its chunk.
__global__ void __launch_bounds__(kThreads) PlaceKernel(CudaExpertSort s) {
  MOE_SHARED_ARRAY(uint16_t, count, kWarps * kMaxExperts);  // [warps, E]
  MOE_SHARED_ARRAY(int32_t, start, kMaxExperts);
  MOE_SHARED_ARRAY(int32_t, place, kMaxExperts);
  const Chunk chunk = ChunkOfBlock(s);
  if (chunk.micro_batch < 0) return;
  const auto warp = static_cast<int>(threadIdx.x) / kWarpLanes;
  const int64_t first = chunk.begin + int64_t{warp} * kWarpSlots;
  uint16_t* const mine = &count[warp * s.num_experts];
  LaneSlots slots;
  ReadExperts(s, first + threadIdx.x % kWarpLanes, kWarpLanes, chunk.end, slots.expert);
  PlaceExperts(s, chunk, start, place);
  RankInWarp(s, slots, mine);
  __syncthreads();
  // Replaces the counts of warps by the sums over the preceding warps.
  for (int e = static_cast<int>(threadIdx.x); e < s.num_experts; e += kThreads) {
    int before = 0;
    for (int w = 0; w < kWarps; ++w) {
      uint16_t& of_warp = count[w * s.num_experts + e];
      const int here = of_warp;
      of_warp = static_cast<uint16_t>(before);
      before += here;
    }
  }
  __syncthreads();
  for (int i = 0; i < kSteps; ++i) {
    const int64_t slot = first + i * kWarpLanes + threadIdx.x % kWarpLanes;
    if (slot >= chunk.end) return;
    int32_t row = -1;
    if (const int32_t e = slots.expert[i]; e >= 0) {
      const int32_t at = place[e] + mine[e] + slots.rank[i];
      if (s.padded_rows == 0 || at < s.padded_rows) row = start[e] + at;
    }
    s.row_of_slot[slot] = row;
    if (row >= 0) s.slot_of_row[row] = static_cast<int32_t>(slot);
  }
}

// A thread owns a row and searches for its slot's token: the last whose slots begin at or before
// it.
__global__ void __launch_bounds__(kThreads) RowTokensKernel(CudaRowTokens r) {
  ForThreads(r.most_rows, [&](int64_t row) {
    const int32_t slot = r.slot_of_row[row];
    int64_t token = -1;
    if (slot >= 0)
      token = LastStartedBy(slot, r.tokens, [&](int64_t t) { return r.slot_offset[t]; });
    r.token_of_row[row] = static_cast<int32_t>(token);
    r.own_row[row] = static_cast<int32_t>(row);
  });
}

// A thread owns a token and compares each slot with the token's earlier slots.
__global__ void __launch_bounds__(kThreads) SlotGroupsKernel(CudaSlotGroups s) {
  ForThreads(s.tokens, [&](int64_t t) {
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

// A thread owns a token and finds, for each slot, the slot that sent the token to its group.
__global__ void __launch_bounds__(kThreads) SentPlacesKernel(CudaSentPlaces p) {
  ForThreads(p.tokens, [&](int64_t t) {
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

// Blocks with the same x own a run, a thread some of its rows.
__global__ void __launch_bounds__(kThreads) ExpertRowsKernel(CudaExpertRows r) {
  const ExpertRun run = r.runs[blockIdx.x];
  for (int64_t row = int64_t{blockIdx.y} * kThreads + threadIdx.x; row < run.rows;
       row += int64_t{gridDim.y} * kThreads) {
    const auto i = static_cast<int32_t>(row);
    r.return_order[run.return_row + i] = run.expert_row + i;
    r.return_place[run.expert_row + i] = run.return_row - run.chunk_row + i;
    if (r.received == nullptr) continue;
    // Clamped, because a peer sent it.
    int32_t place = Min(r.received[run.received + i], run.source_rows - 1);
    if (place < 0) place = 0;
    r.source[run.expert_row + i] = run.source_row + place;
  }
}

bool IsValid(const CudaExpertSort& s) {
  constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();
  if (s.slots < 0 || s.slots > kMaxRows) return false;
  if (s.num_experts < 1 || s.num_experts > kMaxExperts || s.micro_batches < 1) return false;
  if (TableElements(s) > kMaxRows) return false;
  return s.padded_rows >= 0 &&
         s.padded_rows <= kMaxRows / (int64_t{s.num_experts} * s.micro_batches);
}

}  // namespace

cudaError_t Run(const CudaExpertSort& sort, cudaStream_t stream) {
  if (!IsValid(sort)) return cudaErrorInvalidValue;
  // Without slots, offsets and counts are still written.
  const LaunchShape chunks = {dim3(static_cast<unsigned>(MaxChunks(sort))), dim3(kThreads)};
  const cudaError_t counted = Launch(&CountKernel, chunks, stream, sort);
  if (counted != cudaSuccess) return counted;
  const auto table = static_cast<int>(TableElements(sort));
  const cudaError_t summed = ExclusiveSum(sort.scratch, table, sort.scratch + table, stream);
  if (summed != cudaSuccess) return summed;
  return Launch(&PlaceKernel, chunks, stream, sort);
}

cudaError_t Run(const CudaRowTokens& rows, cudaStream_t stream) {
  if (rows.most_rows == 0) return cudaSuccess;
  return Launch(&RowTokensKernel, ThreadShape(rows.most_rows), stream, rows);
}

cudaError_t Run(const CudaSlotGroups& slots, cudaStream_t stream) {
  if (slots.tokens == 0) return cudaSuccess;
  return Launch(&SlotGroupsKernel, ThreadShape(slots.tokens), stream, slots);
}

cudaError_t Run(const CudaSentPlaces& places, cudaStream_t stream) {
  if (places.tokens == 0) return cudaSuccess;
  return Launch(&SentPlacesKernel, ThreadShape(places.tokens), stream, places);
}

cudaError_t Run(const CudaExpertRows& rows, cudaStream_t stream) {
  if (rows.num_runs == 0 || rows.most_rows == 0) return cudaSuccess;
  constexpr unsigned kMostBlocks = 64;  // a run
  const dim3 grid(static_cast<unsigned>(rows.num_runs),
                  Min(GridBlocks(rows.most_rows, kThreads), kMostBlocks));
  return Launch(&ExpertRowsKernel, {grid, dim3(kThreads)}, stream, rows);
}

}  // namespace moe::expert_sort
