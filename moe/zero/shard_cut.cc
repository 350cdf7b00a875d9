#include "moe/zero/shard_cut.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "moe/state/unit_grid.h"

namespace moe {
namespace {

// The cut of `parameter` nearest to `element`, as an element of the parameter.
int64_t CutNear(const Parameter& parameter, int64_t element) {
  for (const BoxInMemory& held : BoxesOf(parameter)) {
    if (element >= held.range().end) continue;
    return held.first + UnitGrid(*held.tensor).CutNear(held.box, element - held.first);
  }
  return parameter.size();
}

}  // namespace

std::vector<int64_t> ShardCut(absl::Span<Parameter* const> parameters, int ranks,
                              absl::Span<int64_t> debts) {
  int64_t total = 0;
  for (const Parameter* p : parameters) total += p->size();
  std::vector<int64_t> counts;
  // First elements of the part, and of the parameter in which it ends.
  int64_t begin = 0, first = 0;
  auto at = parameters.begin();
  for (int64_t rank = 0; rank < ranks; ++rank) {
    const int64_t even = total / ranks * (rank + 1) + total % ranks * (rank + 1) / ranks;
    const int64_t asked = even + (debts.empty() ? 0 : debts[static_cast<size_t>(rank)]);
    const int64_t target = std::clamp(rank + 1 == ranks ? total : asked, begin, total);
    while (at != parameters.end() && target >= first + (*at)->size()) first += (*at++)->size();
    const int64_t end = at == parameters.end() ? total : first + CutNear(**at, target - first);
    if (!debts.empty()) debts[static_cast<size_t>(rank)] = asked - end;
    counts.push_back(end - std::exchange(begin, end));
  }
  return counts;
}

int64_t CutNear(const ParameterBucket& bucket, int64_t element) {
  if (element >= bucket.elements()) return bucket.elements();
  const auto after = std::upper_bound(bucket.first.begin(), bucket.first.end(), element);
  const auto i = static_cast<size_t>(after - bucket.first.begin()) - 1;
  return bucket.first[i] + CutNear(*bucket.parameters[i], element - bucket.first[i]);
}

std::vector<ParameterPiece> PiecesOf(const ParameterBucket& bucket, ElementRange range) {
  std::vector<ParameterPiece> pieces;
  for (size_t i = 0; i < bucket.parameters.size(); ++i) {
    const int64_t first = bucket.first[i];
    const ElementRange common = Common(range, {first, bucket.first[i + 1]});
    if (common.size() <= 0) continue;
    pieces.push_back({bucket.parameters[i], {common.begin - first, common.end - first}, common});
  }
  return pieces;
}

std::vector<ParameterBucket> MakeBuckets(const ParameterStore& store, const BucketOptions& options,
                                         const Mesh& mesh) {
  std::vector<ParameterBucket> closed;
  GroupMap<ParameterBucket> open;
  const auto all = store.parameters();
  const auto close = [&](ParameterBucket& bucket) {
    closed.push_back(std::exchange(bucket, {}));
  };
  for (auto end = all.end(); end != all.begin();) {
    const auto slab = all.begin() + end[-1]->slab();
    for (auto p = slab; p != end; ++p) {
      if (!(*p)->spec().trainable) continue;
      const MeshGroup holders = mesh.Canonical((*p)->spec().holders);
      ParameterBucket& bucket = open[holders];
      if (!bucket.parameters.empty() && bucket.chunk() != (*p)->chunk()) close(bucket);
      bucket.holders = holders;
      bucket.parameters.push_back(p->get());
      bucket.first.push_back(bucket.elements() + (*p)->size());
      if (bucket.elements() * options.element_bytes >= options.bucket_bytes) close(bucket);
    }
    end = slab;
  }
  for (ParameterBucket& bucket : open) {
    if (!bucket.parameters.empty()) close(bucket);
  }
  std::stable_sort(closed.begin(), closed.end(), [](const auto& a, const auto& b) {
    return a.parameters.back()->slab() > b.parameters.back()->slab();
  });
  GroupMap<std::vector<int64_t>> debts;
  for (ParameterBucket& bucket : closed) {
    const int ranks = mesh.size(bucket.holders);
    std::vector<int64_t>& debt = debts[bucket.holders];
    debt.resize(static_cast<size_t>(ranks), 0);
    bucket.counts = ShardCut(bucket.parameters, ranks, absl::MakeSpan(debt));
    const auto mine = bucket.counts.begin() + mesh.index(bucket.holders);
    bucket.own.begin = std::accumulate(bucket.counts.begin(), mine, int64_t{0});
    bucket.own.end = bucket.own.begin + *mine;
    const bool of_ends = bucket.holders == MeshGroup::kEnds;
    bucket.placement = of_ends ? OfEnds(options.placement) : options.placement;
    if (ranks == 1) bucket.placement = {.tier = options.placement.tier};
  }
  return closed;
}

RoundBuffers RoundBuffersOf(absl::Span<const ParameterBucket> buckets) {
  RoundBuffers buffers;
  GroupMap<int64_t> seen;  // buckets of each group so far
  for (const ParameterBucket& bucket : buckets) {
    if (bucket.placement.sums == Holding::kWhole) continue;
    if (++seen[bucket.holders] <= 2) ++buffers.count;
    buffers.elements = std::max(buffers.elements, bucket.elements());
  }
  return buffers;
}

double StateBytesOf(absl::Span<const ParameterBucket> buckets, DType compute, Numerics numerics,
                    const Mesh& mesh) {
  double bytes = 0;
  for (const ParameterBucket& bucket : buckets) {
    bytes += static_cast<double>(bucket.elements()) *
             BytesOfElement(bucket.placement, compute, numerics, mesh.size(bucket.holders));
  }
  const RoundBuffers rounds = RoundBuffersOf(buckets);
  return bytes + static_cast<double>(rounds.count * rounds.elements * SumBytesOfElement(numerics));
}

}  // namespace moe
