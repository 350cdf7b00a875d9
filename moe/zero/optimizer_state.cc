#include "moe/zero/optimizer_state.h"

#include <algorithm>
#include <utility>

#include "kernels/base/status_macros.h"

namespace moe {

namespace {

// Whether the optimizer alone keeps masters of the bucket, in place of the store.
bool KeepsMasters(const ParameterBucket& bucket, DType compute) {
  const bool in_file = bucket.placement.tier == StateTier::kFile;
  return (bucket.sharded() || in_file) && compute != DType::kFloat32;
}

}  // namespace

absl::StatusOr<OptimizerState> OptimizerState::Create(absl::Span<const ParameterBucket> buckets,
                                                      ParameterStore& store, const Context& context,
                                                      const StateFileOptions& file) {
  OptimizerState state;
  state.stream_ = context.compute;
  state.blocks_.resize(buckets.size());
  for (size_t b = 0; b < buckets.size(); ++b) {
    state.AddPages(b, buckets[b], store.compute(), file.page_bytes);
  }
  // All buckets have one tier.
  if (!buckets.empty() && buckets[0].placement.tier == StateTier::kFile && !state.pages_.empty()) {
    std::vector<int64_t> bytes;
    for (const Page& page : state.pages_) bytes.push_back(page.bytes());
    state.page_bytes_ = *std::max_element(bytes.begin(), bytes.end());
    MOE_ASSIGN_OR_RETURN(state.file_, StateFile::Create(file, context.mesh->world().rank(), bytes));
  }
  GroupMap<std::vector<size_t>> packs;  // buckets that have slabs in common
  for (size_t b = 0; b < buckets.size(); ++b) {
    MOE_RETURN_IF_ERROR(store.Provide(buckets[b].parameters));
    MOE_RETURN_IF_ERROR(state.Keep(b, context));
    if (!buckets[b].sharded() && !KeepsMasters(buckets[b], store.compute())) continue;
    std::vector<size_t>& pack = packs[buckets[b].holders];
    pack.push_back(b);
    if (!store.EndsSlab(*buckets[b].parameters.back())) continue;
    MOE_RETURN_IF_ERROR(state.Pack(pack, buckets, store, context));
    pack.clear();
  }
  return state;
}

void OptimizerState::AddPages(size_t b, const ParameterBucket& bucket, DType compute,
                              int64_t page_bytes) {
  const bool in_file = bucket.placement.tier == StateTier::kFile;
  const bool keeps_masters = KeepsMasters(bucket, compute);
  const auto ranges = in_file ? PagesOf(bucket, OptimizerBytesOfElement(compute), page_bytes)
                              : std::vector<ElementRange>{bucket.kept()};
  for (const ElementRange range : ranges) {
    Page page = {range, slices_.size(), slices_.size(), keeps_masters};
    for (const ParameterPiece& piece : PiecesOf(bucket, range)) {
      const int64_t first =
          piece.bucket.begin - piece.range.begin;  // the parameter's in the bucket
      Slice& slice = slices_.emplace_back();
      slice.piece = piece;
      slice.bucket = b;
      slice.own = {std::clamp(bucket.own.begin - first, piece.range.begin, piece.range.end),
                   std::clamp(bucket.own.end - first, piece.range.begin, piece.range.end)};
      slice.keeps_master = keeps_masters && !piece.parameter->is_vector();
      ++page.end_slice;
    }
    pages_.push_back(page);
  }
  first_page_.push_back(pages_.size());
}

// Gives the pages of a bucket their first values. Those of a file are zeros without that.
absl::Status OptimizerState::Keep(size_t b, const Context& context) {
  for (size_t p = first_page_[b]; p < first_page_[b + 1]; ++p) {
    const Page& page = pages_[p];
    if (file_ == nullptr) {
      MOE_ASSIGN_OR_RETURN(Buffer buffer,
                           Buffer::Allocate(page.bytes(), *context.memory, "optimiser state"));
      Place(page, buffer.span<float>());
      values_.push_back(std::move(buffer));
      MOE_RETURN_IF_ERROR(CopyMasters(page, *context.compute));
    } else if (page.keeps_masters) {
      MOE_ASSIGN_OR_RETURN(const auto bytes, file_->Acquire(p, StateUse::kOverwrite));
      std::fill(bytes.begin(), bytes.end(), std::byte{0});
      Place(page,
            absl::MakeSpan(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)));
      MOE_RETURN_IF_ERROR(CopyMasters(page, *context.compute));
      Hide(page);
      file_->Release();
    }
  }
  return absl::OkStatus();
}

void OptimizerState::Place(const Page& page, absl::Span<float> values) {
  const auto all = static_cast<size_t>(page.range.size());
  for (size_t i = page.begin_slice; i < page.end_slice; ++i) {
    Slice& slice = slices_[i];
    const auto at = static_cast<size_t>(slice.piece.bucket.begin - page.range.begin);
    const auto size = static_cast<size_t>(slice.piece.range.size());
    slice.mean = values.subspan(at, size);
    slice.mean_square = values.subspan(all + at, size);
    if (slice.keeps_master) slice.kept_master = values.subspan(2 * all + at, size);
  }
}

void OptimizerState::Hide(const Page& page) {
  for (size_t i = page.begin_slice; i < page.end_slice; ++i) {
    slices_[i].kept_master = slices_[i].mean = slices_[i].mean_square = {};
  }
}

// From the store, which still has them.
absl::Status OptimizerState::CopyMasters(const Page& page, Stream& stream) {
  for (size_t i = page.begin_slice; i < page.end_slice; ++i) {
    const Slice& slice = slices_[i];
    if (!slice.keeps_master) continue;
    MOE_RETURN_IF_ERROR(stream.CopyBytes(
        slice.piece.parameter->master().data() + slice.piece.range.begin, slice.kept_master.data(),
        slice.piece.range.size() * static_cast<int64_t>(sizeof(float))));
  }
  return stream.Synchronize();
}

absl::Status OptimizerState::ForEach(size_t begin_bucket, size_t end_bucket, StateUse use,
                                     Visit visit) {
  const size_t begin = first_page_[begin_bucket], end = first_page_[end_bucket];
  if (begin == end) return absl::OkStatus();
  const auto slices = [this](const Page& first, const Page& last) {
    return absl::MakeConstSpan(slices_).subspan(first.begin_slice,
                                                last.end_slice - first.begin_slice);
  };
  if (file_ == nullptr) return visit(slices(pages_[begin], pages_[end - 1]));
  for (size_t p = begin; p < end; ++p) {
    const Page& page = pages_[p];
    MOE_ASSIGN_OR_RETURN(const auto bytes, file_->Acquire(p, use));
    Place(page,
          absl::MakeSpan(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float)));
    const absl::Status visited = visit(slices(page, page));
    const absl::Status passed = stream_->Synchronize();
    Hide(page);
    file_->Release();
    MOE_RETURN_IF_ERROR(visited);
    MOE_RETURN_IF_ERROR(passed);
  }
  return absl::OkStatus();
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
  for (Slice& slice : slices_) {
    if (slice.bucket != b) continue;
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
  int64_t total = file_ == nullptr ? 0 : file_->bytes();
  for (const Buffer& values : values_) total += values.bytes();
  for (const Buffer& part : weights_) total += part.bytes();
  return total;
}

}  // namespace moe
