#include "comm/mpi/mpi_group.h"

#include <absl/container/inlined_vector.h>

#include "comm/reduce.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Received parts of a reduction are summed while they are still in the cache, and the scratch stays
// small: R segments.
constexpr int64_t kSegmentBytes = int64_t{512} << 10;

MPI_Datatype ToMpi(DType type) {
  switch (type) {
    case DType::kFloat32:
      return MPI_FLOAT;
    case DType::kFloat64:
      return MPI_DOUBLE;
    case DType::kInt32:
      return MPI_INT32_T;
    case DType::kInt64:
      return MPI_INT64_T;
    default:
      return MPI_DATATYPE_NULL;
  }
}

}  // namespace

absl::Status MpiGroup::RollCall(const char* operation, const CommPhase& phase, int64_t count,
                                DType type, ReduceOp op, int root) {
  const CallCard mine = CardOf(operation, count, type, op, root);
  absl::InlinedVector<CallCard, 16> all(stream.size());
  MOE_RETURN_IF_ERROR(
      stream.Gather({operation, kRollCall, phase}, &mine, all.data(), sizeof(CallCard)));
  const std::vector<int>& names = stream.world_ranks();
  for (int r = 0; r < stream.size(); ++r) {
    const absl::Status same = CheckSame(mine, names[stream.rank()], all[r], names[r]);
    if (!same.ok()) return stream.Kill(same);
  }
  return absl::OkStatus();
}

absl::Status MpiGroup::SumParts(const MpiCall& call, const std::byte* const* parts,
                                absl::Span<const int64_t> counts, std::byte* out, DType type,
                                ReduceOp op) {
  const int ranks = stream.size();
  const int rank = stream.rank();
  const int64_t width = SizeOf(type);
  const int64_t segment = kSegmentBytes / width;
  const int64_t longest = *std::max_element(counts.begin(), counts.end());
  if (scratch_.bytes() == 0) {
    MOE_ASSIGN_OR_RETURN(scratch_, Buffer::Allocate(kSegmentBytes * ranks));
  }
  for (int64_t begin = 0; begin == 0 || begin < longest; begin += segment) {
    const auto length = [&](int r) {
      return std::clamp<int64_t>(counts[r] - begin, 0, segment);
    };
    absl::InlinedVector<const std::byte*, 16> inputs(ranks);
    stream.Begin(call);
    for (int i = 1; i < ranks; ++i) {
      const int r = (rank + i) % ranks;
      std::byte* const slot = scratch_.data() + r * kSegmentBytes;
      inputs[r] = slot;
      stream.Receive(r, slot, length(rank) * width);
    }
    for (int i = 1; i < ranks; ++i) {
      const int r = (rank + i) % ranks;
      stream.Send(r, parts[r] + begin * width, length(r) * width);
    }
    inputs[rank] = parts[rank] + begin * width;
    MOE_RETURN_IF_ERROR(stream.Finish());
    std::byte* const output = out + begin * width;
    ReduceInOrder(inputs, absl::MakeConstSpan(&output, 1), 0, length(rank), type, op);
  }
  return absl::OkStatus();
}

absl::Status MpiGroup::AllReduceInRankOrder(const CommPhase& phase, std::byte* inout, int64_t count,
                                            DType type, ReduceOp op) {
  const int ranks = stream.size();
  const int rank = stream.rank();
  const int64_t width = SizeOf(type);
  absl::InlinedVector<const std::byte*, 16> parts;
  absl::InlinedVector<int64_t, 16> counts;
  for (int r = 0; r < ranks; ++r) {
    parts.push_back(inout + PartBegin(count, r) * width);
    counts.push_back(PartBegin(count, r + 1) - PartBegin(count, r));
  }
  std::byte* const own = inout + PartBegin(count, rank) * width;
  MOE_RETURN_IF_ERROR(SumParts({"AllReduce", kReduce, phase}, parts.data(), counts, own, type, op));
  stream.Begin({"AllReduce", kAllGather, phase});
  for (int i = 1; i < ranks; ++i) {
    const int r = (rank + i) % ranks;
    stream.Receive(r, inout + PartBegin(count, r) * width, counts[r] * width);
  }
  for (int i = 1; i < ranks; ++i) {
    stream.Send((rank + i) % ranks, own, counts[rank] * width);
  }
  return stream.Finish();
}

absl::Status MpiGroup::AllReduceByLibrary(const CommPhase& phase, std::byte* inout, int64_t count,
                                          DType type, ReduceOp op) {
  MOE_RETURN_IF_ERROR(RollCall("AllReduce", phase, count, type, op, 0));
  for (int64_t begin = 0; begin < count; begin += kMpiLibraryCount) {
    const auto n = static_cast<int>(std::min(count - begin, kMpiLibraryCount));
    MOE_RETURN_IF_ERROR(stream.Run({"AllReduce", 0, phase}, [&](MPI_Request* request) {
      return MPI_Iallreduce(MPI_IN_PLACE, inout + begin * SizeOf(type), n, ToMpi(type),
                            op == ReduceOp::kSum ? MPI_SUM : MPI_MAX, stream.comm(), request);
    }));
  }
  return absl::OkStatus();
}

}  // namespace moe
