#include "comm/mpi/mpi_group.h"

#include <absl/container/inlined_vector.h>

#include "comm/copy.h"
#include "comm/reduce.h"
#include "comm/wait_report.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"

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

absl::Status MpiGroup::Collective(const CollectiveCall& call) {
  switch (call.kind) {
    case CollectiveKind::kAllReduce:
      // MPI has no 16-bit types, and pairs summed in them would round at every step.
      return Is16BitFloat(call.type) ? AllReduceInRankOrder(call) : ByLibrary(call);
    case CollectiveKind::kReduceScatter:
    case CollectiveKind::kReduceScatterV:
      return ReduceScatter(call);
    case CollectiveKind::kBroadcast:
      return ByLibrary(call);
    default:
      return AllToAllV(call);
  }
}

absl::Status MpiGroup::RollCall(const CollectiveCall& call) {
  const CallCard mine = CardOf(call);
  absl::InlinedVector<CallCard, 16> all(stream.size());
  MOE_RETURN_IF_ERROR(stream.Gather({NameOf(call.kind), kRollCall, call.site}, &mine, all.data(),
                                    sizeof(CallCard)));
  const std::vector<int>& names = stream.world_ranks();
  for (int r = 0; r < stream.size(); ++r) {
    const absl::Status same = CheckSame(mine, names[stream.rank()], all[r], names[r]);
    if (!same.ok()) return stream.Kill(same);
  }
  return absl::OkStatus();
}

absl::Status MpiGroup::SumParts(const CollectiveCall& call, const std::byte* const* parts,
                                absl::Span<const int64_t> counts, std::byte* out) {
  const int ranks = stream.size();
  const int rank = stream.rank();
  const int64_t width = SizeOf(call.type);
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
    stream.Begin({NameOf(call.kind), kReduce, call.site});
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
    ReduceInOrder(inputs, absl::MakeConstSpan(&output, 1), 0, length(rank), call.type, call.op);
  }
  return absl::OkStatus();
}

absl::Status MpiGroup::AllReduceInRankOrder(const CollectiveCall& call) {
  const int ranks = stream.size();
  const int rank = stream.rank();
  const int64_t width = SizeOf(call.type), count = call.count();
  std::byte* const inout = call.recv.data();
  absl::InlinedVector<const std::byte*, 16> parts;
  RankCounts counts;
  for (int r = 0; r < ranks; ++r) {
    parts.push_back(inout + PartBegin(count, r) * width);
    counts.push_back(PartBegin(count, r + 1) - PartBegin(count, r));
  }
  std::byte* const own = inout + PartBegin(count, rank) * width;
  MOE_RETURN_IF_ERROR(SumParts(call, parts.data(), counts, own));
  stream.Begin({"AllReduce", kAllGather, call.site});
  for (int i = 1; i < ranks; ++i) {
    const int r = (rank + i) % ranks;
    stream.Receive(r, inout + PartBegin(count, r) * width, counts[r] * width);
  }
  for (int i = 1; i < ranks; ++i) {
    stream.Send((rank + i) % ranks, own, counts[rank] * width);
  }
  return stream.Finish();
}

absl::Status MpiGroup::ReduceScatter(const CollectiveCall& call) {
  absl::InlinedVector<const std::byte*, 16> parts;
  RankCounts counts;
  const std::byte* part = call.send.data();
  for (const int64_t bytes : call.send_counts) {
    parts.push_back(part);
    counts.push_back(bytes / SizeOf(call.type));
    part += bytes;
  }
  return SumParts(call, parts.data(), counts, call.recv.data());
}

// A gather sends one part to all.
absl::Status MpiGroup::AllToAllV(const CollectiveCall& call) {
  const int rank = stream.rank(), name = stream.world_ranks()[rank];
  const RankCounts &out = call.send_counts, &in = call.recv_counts;
  if (out[rank] != in[rank]) {
    return stream.Kill(OtherSizeError(NameOf(call.kind), name, in[rank], name, out[rank]));
  }
  stream.Begin({NameOf(call.kind), kAllToAllV, call.site});
  std::byte* to = call.recv.data();
  std::byte* own = nullptr;
  for (int r = 0; r < stream.size(); ++r) {
    if (r == rank) {
      own = to;
    } else {
      stream.Receive(r, to, in[r]);
    }
    to += in[r];
  }
  const std::byte* from = call.send.data();
  const std::byte* own_from = nullptr;
  for (int r = 0; r < stream.size(); ++r) {
    if (r == rank) {
      own_from = from;
    } else {
      stream.Send(r, from, out[r]);
    }
    if (!call.gathers()) from += out[r];
  }
  CopyBytes(own, own_from, out[rank]);  // while the peers take theirs
  return stream.Finish();
}

absl::Status MpiGroup::ByLibrary(const CollectiveCall& call) {
  MOE_RETURN_IF_ERROR(RollCall(call));
  for (int64_t begin = 0; begin < call.count(); begin += kMpiLibraryCount) {
    const auto n = static_cast<int>(std::min(call.count() - begin, kMpiLibraryCount));
    std::byte* const part = call.recv.data() + begin * SizeOf(call.type);
    MOE_RETURN_IF_ERROR(stream.Run({NameOf(call.kind), 0, call.site}, [&](MPI_Request* request) {
      if (call.kind == CollectiveKind::kBroadcast) {
        return MPI_Ibcast(part, n, MPI_BYTE, call.root, stream.comm(), request);
      }
      return MPI_Iallreduce(MPI_IN_PLACE, part, n, ToMpi(call.type),
                            call.op == ReduceOp::kSum ? MPI_SUM : MPI_MAX, stream.comm(), request);
    }));
  }
  return absl::OkStatus();
}

}  // namespace moe
