#include "moe/zero/optimizer_state.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"

namespace moe {

absl::StatusOr<OptimizerState> OptimizerState::Create(absl::Span<const ParameterBucket> buckets,
                                                      ParameterStore& store,
                                                      const Context& context) {
  OptimizerState state;
  state.blocks_.resize(buckets.size());
  GroupMap<std::vector<size_t>> packs;  // buckets that have slabs in common
  for (size_t b = 0; b < buckets.size(); ++b) {
    MOE_RETURN_IF_ERROR(store.Provide(buckets[b].parameters));
    MOE_RETURN_IF_ERROR(state.Keep(buckets[b], store.compute(), context));
    if (!buckets[b].sharded()) continue;
    std::vector<size_t>& pack = packs[buckets[b].holders];
    pack.push_back(b);
    if (!store.EndsSlab(*buckets[b].parameters.back())) continue;
    MOE_RETURN_IF_ERROR(state.Pack(pack, buckets, store, context));
    pack.clear();
  }
  return state;
}

absl::Status OptimizerState::Keep(const ParameterBucket& bucket, DType compute,
                                  const Context& context) {
  Stream& stream = *context.compute;
  const ElementRange kept = bucket.kept();
  const bool keeps_masters = bucket.sharded() && compute != DType::kFloat32;
  MOE_ASSIGN_OR_RETURN(Buffer buffer, Buffer::Allocate((keeps_masters ? 3 : 2) * kept.size() *
                                                           static_cast<int64_t>(sizeof(float)),
                                                       *context.memory, "optimiser state"));
  const auto values = buffer.span<float>();
  const auto all = static_cast<size_t>(kept.size());
  for (const ParameterPiece& piece : PiecesOf(bucket, kept)) {
    const auto at = static_cast<size_t>(piece.bucket.begin - kept.begin);
    const auto size = static_cast<size_t>(piece.range.size());
    const int64_t first = piece.bucket.begin - piece.range.begin;  // the parameter's in the bucket
    Slice& slice = slices_.emplace_back();
    slice.piece = piece;
    slice.own = {std::clamp(bucket.own.begin - first, piece.range.begin, piece.range.end),
                 std::clamp(bucket.own.end - first, piece.range.begin, piece.range.end)};
    slice.mean = values.subspan(at, size);
    slice.mean_square = values.subspan(all + at, size);
    if (!keeps_masters || piece.parameter->is_vector()) continue;
    const absl::Span<const float> master = slice.master();
    slice.kept_master = values.subspan(2 * all + at, size);
    MOE_RETURN_IF_ERROR(stream.CopyBytes(master.data(), slice.kept_master.data(),
                                         std::ssize(master) * int64_t{sizeof(float)}));
  }
  values_.push_back(std::move(buffer));
  first_slice_.push_back(slices_.size());
  return stream.Synchronize();
}

// Moves what layers read of the buckets `pack` into one block.
absl::Status OptimizerState::Pack(absl::Span<const size_t> pack,
                                  absl::Span<const ParameterBucket> buckets, ParameterStore& store,
                                  const Context& context) {
  std::vector<Parameter*> parameters;
  for (const size_t b : pack) {
    const auto& more = buckets[b].parameters;
    parameters.insert(parameters.end(), more.begin(), more.end());
  }
  MOE_ASSIGN_OR_RETURN(const PackedParameters packed, store.Pack(parameters, *context.compute));
  size_t at = 0;  // the bucket's first parameter in `packed`
  for (const size_t b : pack) {
    const ParameterBucket& bucket = buckets[b];
    const size_t end = at + bucket.parameters.size();
    const auto byte_of = [&](int64_t element) {
      if (element == bucket.elements()) return packed.first_byte[end];
      const auto after = std::upper_bound(bucket.first.begin(), bucket.first.end() - 1, element);
      const auto i = static_cast<size_t>(after - bucket.first.begin()) - 1;
      return packed.first_byte[at + i] + (element - bucket.first[i]) * packed.element_bytes[at + i];
    };
    BucketBlock& block = blocks_[b];
    block.first_byte.assign(&packed.first_byte[at], &packed.first_byte[end] + 1);
    block.element_bytes.assign(&packed.element_bytes[at], packed.element_bytes.data() + end);
    const auto bytes_from = [&](int64_t begin, int64_t bytes) {
      return packed.block.subspan(static_cast<size_t>(begin), static_cast<size_t>(bytes));
    };
    block.bytes = bytes_from(byte_of(0), byte_of(bucket.elements()) - byte_of(0));
    int64_t element = 0;
    for (const int64_t count : bucket.counts) {
      block.part_bytes.push_back(byte_of(element + count) - byte_of(element));
      element += count;
    }
    block.own =
        bytes_from(byte_of(bucket.own.begin), byte_of(bucket.own.end) - byte_of(bucket.own.begin));
    if (bucket.placement.weights == Holding::kPart) {
      MOE_RETURN_IF_ERROR(KeepOwn(b, bucket, context));
    }
    at = end;
  }
  if (!pack.empty() && buckets[pack.front()].placement.weights == Holding::kPart) {
    store.KeepInParts(parameters);
  }
  return absl::OkStatus();
}

// Copies the own part of a block, which then goes.
absl::Status OptimizerState::KeepOwn(size_t b, const ParameterBucket& bucket,
                                     const Context& context) {
  BucketBlock& block = blocks_[b];
  const uint8_t* const first = block.bytes.data();
  const auto begin = static_cast<int64_t>(block.own.data() - first);       // in the bucket
  const int64_t shift = (block.first_byte.front() + begin) % kPackedLine;  // elements stay aligned
  const auto bytes = std::ssize(block.own);
  MOE_ASSIGN_OR_RETURN(Buffer kept,
                       Buffer::Allocate(shift + bytes, *context.memory, "weights of this rank"));
  const auto own = kept.span<uint8_t>().subspan(static_cast<size_t>(shift));
  MOE_RETURN_IF_ERROR(context.compute->CopyBytes(block.own.data(), own.data(), bytes));
  MOE_RETURN_IF_ERROR(context.compute->Synchronize());
  block.own = own;
  block.bytes = {};
  weights_.push_back(std::move(kept));
  for (size_t s = first_slice_[b]; s < first_slice_[b + 1]; ++s) {
    Slice& slice = slices_[s];
    const auto i = static_cast<size_t>(
        std::find(bucket.parameters.begin(), bucket.parameters.end(), slice.piece.parameter) -
        bucket.parameters.begin());
    const ElementRange range = slice.piece.range;
    const int64_t at = block.first_byte[i] - block.first_byte.front() +
                       range.begin * block.element_bytes[i] - begin;
    slice.weights = own.subspan(static_cast<size_t>(at),
                                static_cast<size_t>(range.size() * block.element_bytes[i]));
  }
  return absl::OkStatus();
}

int64_t OptimizerState::bytes() const {
  int64_t total = 0;
  for (const Buffer& values : values_) total += values.bytes();
  for (const Buffer& part : weights_) total += part.bytes();
  return total;
}

}  // namespace moe
