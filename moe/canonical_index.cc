#include "moe/canonical_index.h"

#include <algorithm>
#include <string>

#include <absl/strings/str_split.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "kernels/base/status_macros.h"

namespace moe {
namespace {

// Every rank's names, newline after each.
absl::StatusOr<std::string> GatherNames(const ParameterStore& store, Communicator& group,
                                        Stream& stream) {
  std::string mine;
  for (const auto& p : store.parameters()) mine += p->spec().name + "\n";
  std::vector<int64_t> length = {static_cast<int64_t>(mine.size())};
  MOE_RETURN_IF_ERROR(group.AllReduce<int64_t>(absl::MakeSpan(length), ReduceOp::kMax, stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  mine.resize(length[0], '\n');
  std::string all(mine.size() * group.size(), '\n');
  const auto bytes = [](std::string& s) {
    return absl::Span<uint8_t>(reinterpret_cast<uint8_t*>(s.data()), s.size());
  };
  MOE_RETURN_IF_ERROR(group.AllGather<uint8_t>(bytes(mine), bytes(all), stream));
  MOE_RETURN_IF_ERROR(stream.Synchronize());
  return all;
}

// Over the expert-parallel group.
absl::Status SumOnHost(absl::Span<int64_t> values, const Context& context) {
  MOE_RETURN_IF_ERROR(
      context.mesh->expert_parallel().AllReduce<int64_t>(values, ReduceOp::kSum, *context.host));
  return context.host->Synchronize();
}

}  // namespace

absl::StatusOr<CanonicalIndex> CanonicalIndex::Create(const ParameterStore& store,
                                                      const Context& context) {
  Communicator& group = context.mesh->expert_parallel();
  MOE_ASSIGN_OR_RETURN(const std::string all, GatherNames(store, group, *context.host));
  std::vector<std::string> names = absl::StrSplit(all, '\n', absl::SkipEmpty());
  std::sort(names.begin(), names.end());
  names.erase(std::unique(names.begin(), names.end()), names.end());
  CanonicalIndex index;
  index.size_ = static_cast<int64_t>(names.size());
  index.first_rank_ = group.rank() == 0;
  for (const auto& p : store.parameters()) {
    const auto at = std::lower_bound(names.begin(), names.end(), p->spec().name);
    index.position_.push_back(at - names.begin());
  }
  return index;
}

absl::StatusOr<uint64_t> HashWeights(const ParameterStore& store, const CanonicalIndex& index,
                                     const Context& context) {
  // One speaker each, zeros elsewhere: the integer sum is the speaker's value.
  std::vector<int64_t> hashes(index.size(), 0);
  for (const auto& p : store.parameters()) {
    if (!index.speaks_for(*p)) continue;
    const std::string& name = p->spec().name;
    const uint64_t seed = XXH3_64bits(name.data(), name.size());
    MOE_ASSIGN_OR_RETURN(const std::vector<float> values, p->ReadMaster(*context.compute));
    hashes[index.position(*p)] = static_cast<int64_t>(
        XXH3_64bits_withSeed(values.data(), values.size() * sizeof(float), seed));
  }
  MOE_RETURN_IF_ERROR(SumOnHost(absl::MakeSpan(hashes), context));
  return XXH3_64bits(hashes.data(), hashes.size() * sizeof(int64_t));
}

absl::StatusOr<int64_t> CountParameters(const ParameterStore& store, const CanonicalIndex& index,
                                        const Context& context) {
  std::vector<int64_t> count = {0};
  for (const auto& p : store.parameters()) {
    if (index.speaks_for(*p)) count[0] += p->size();
  }
  MOE_RETURN_IF_ERROR(SumOnHost(absl::MakeSpan(count), context));
  return count[0];
}

}  // namespace moe
