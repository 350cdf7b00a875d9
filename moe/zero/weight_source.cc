#include "moe/zero/weight_source.h"

#include <algorithm>
#include <map>
#include <utility>

#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "kernels/base/workspace.h"

namespace moe {

GatheredWeights::GatheredWeights(absl::Span<const ParameterBucket> buckets,
                                 const OptimizerState& state, ParameterStore& store,
                                 const Context& context, Stream& stream)
    : buckets_(buckets),
      state_(state),
      store_(store),
      context_(context),
      stream_(stream),
      residences_(store.parameters().size()),
      gather_(buckets, context, MeshLane::kWeights, stream) {
  for (size_t b = 0; b < buckets.size(); ++b) {
    if (buckets[b].placement.weights == Holding::kWhole) continue;
    for (size_t i = 0; i < buckets[b].parameters.size(); ++i) {
      ResidenceOf(*buckets[b].parameters[i]) = {.bucket = static_cast<int64_t>(b), .position = i};
    }
  }
}

// A gather that was started ahead and is not needed has been started on all ranks.
GatheredWeights::~GatheredWeights() {
  stream_.Synchronize().IgnoreError();
  gather_.Finish().IgnoreError();
}

absl::Status GatheredWeights::Acquire(const Pass& pass, absl::Span<Parameter* const> parameters) {
  Bundle& bundle = BundleOf(parameters);
  const auto is_leased = [&](const Tensor& t) {
    return ResidenceOf(*t.parameter).leases > 0;
  };
  // A lease inside another one.
  const bool here = std::all_of(bundle.tensors.begin(), bundle.tensors.end(), is_leased);
  if (!here) {
    Follow(bundle, pass);
    if (bundle.block < 0) {
      MOE_RETURN_IF_ERROR(Gather(bundle, FreeBlock(/*must=*/true), pass.site));
    }
    MOE_RETURN_IF_ERROR(Show(bundle, pass.site));
  }
  for (const Tensor& tensor : bundle.tensors) {
    Residence& residence = ResidenceOf(*tensor.parameter);
    ++residence.leases;
    ++blocks_[static_cast<size_t>(residence.block)].leases;
  }
  const absl::Status ahead = here ? absl::OkStatus() : GatherNext(pass.site);
  if (!ahead.ok()) Release(parameters);
  return ahead;
}

void GatheredWeights::Release(absl::Span<Parameter* const> parameters) {
  for (const Tensor& tensor : BundleOf(parameters).tensors) {
    Residence& residence = ResidenceOf(*tensor.parameter);
    --blocks_[static_cast<size_t>(residence.block)].leases;
    if (--residence.leases == 0) {
      store_.SetValues(*tensor.parameter, absl::Span<const std::byte>());
    }
  }
}

absl::Status GatheredWeights::Forget() {
  MOE_RETURN_IF_ERROR(JoinStreams(*context_.compute, stream_));
  for (Block& block : blocks_) {
    if (block.leases > 0) {
      return absl::FailedPreconditionError(absl::StrCat(
          "GatheredWeights: weights of step ", site_.step, ", layer ", block.bundle->layer,
          " are leased, expected no lease while the optimiser moves them"));
    }
    if (block.bundle != nullptr) std::exchange(block.bundle, nullptr)->block = -1;
  }
  last_rounds_ = std::exchange(rounds_, 0);
  before_ = now_ = nullptr;
  for (Bundle& bundle : bundles_) {
    bundle.rounded = false;
    for (const Tensor& tensor : bundle.tensors) {
      MOE_RETURN_IF_ERROR(store_.RefreshCompute(*tensor.parameter, *context_.compute));
    }
  }
  return absl::OkStatus();
}

int64_t GatheredWeights::bytes() const {
  int64_t total = 0;
  for (const Block& block : blocks_) total += block.memory.bytes();
  return total;
}

int64_t GatheredWeights::formula_bytes() const {
  return std::min<int64_t>(2, gathered_bundles_) * largest_elements_ * SizeOf(store_.compute());
}

GatheredWeights::Bundle& GatheredWeights::BundleOf(absl::Span<Parameter* const> parameters) {
  const auto found = std::find_if(bundles_.begin(), bundles_.end(), [&](const Bundle& bundle) {
    return std::equal(parameters.begin(), parameters.end(), bundle.parameters.begin(),
                      bundle.parameters.end());
  });
  return found != bundles_.end() ? *found : bundles_.emplace_back(MakeBundle(parameters));
}

GatheredWeights::Bundle GatheredWeights::MakeBundle(absl::Span<Parameter* const> parameters) const {
  Bundle bundle;
  bundle.parameters.assign(parameters.begin(), parameters.end());
  // Positions in each bucket; those of experts stay together, since a slab may span buckets.
  std::map<std::pair<MeshGroup, size_t>, std::vector<size_t>> taken;
  for (const Parameter* p : parameters) {
    const Residence& residence = residences_[static_cast<size_t>(p->index())];
    if (residence.bucket < 0) continue;
    const auto b = static_cast<size_t>(residence.bucket);
    taken[{buckets_[b].holders, b}].push_back(residence.position);
  }
  for (auto& [key, positions] : taken) {
    std::sort(positions.begin(), positions.end());
    for (size_t first = 0, last = 0; first < positions.size(); first = last) {
      for (last = first + 1; last < positions.size(); ++last) {
        if (positions[last] != positions[last - 1] + 1) break;
      }
      AddRun(key.second, positions[first], positions[last - 1] + 1, bundle);
    }
  }
  return bundle;
}

// Adds parameters [first, last) of a bucket. Their bytes keep their place in a line, so that a slab
// that goes on in the next bucket has no gap.
void GatheredWeights::AddRun(size_t b, size_t first, size_t last, Bundle& bundle) const {
  const BucketBlock& block = state_.block(b);
  const int64_t begin = block.first_byte[first], end = block.first_byte[last];
  const int64_t line = (begin - bundle.bytes) % kPackedLine;
  Run run = {.bucket = b,
             .first_byte = bundle.bytes + (line + kPackedLine) % kPackedLine,
             .bytes = end - begin};
  int64_t part_begin = block.first_byte.front();
  const int mine = context_.mesh->index(buckets_[b].holders);
  for (size_t r = 0; r < block.part_bytes.size(); ++r) {
    const int64_t part_end = part_begin + block.part_bytes[r];
    const int64_t from = std::clamp(part_begin, begin, end), to = std::clamp(part_end, begin, end);
    run.part_bytes.push_back(to - from);
    if (static_cast<int>(r) == mine && to > from) {
      run.own =
          block.own.subspan(static_cast<size_t>(from - part_begin), static_cast<size_t>(to - from));
    }
    part_begin = part_end;
  }
  for (size_t i = first; i < last; ++i) {
    Parameter* const parameter = buckets_[b].parameters[i];
    bundle.tensors.push_back({parameter, run.first_byte + block.first_byte[i] - begin,
                              parameter->size() * block.element_bytes[i]});
    bundle.elements += parameter->size();
  }
  bundle.bytes = run.first_byte + run.bytes;
  bundle.runs.push_back(std::move(run));
}

GatheredWeights::Next& GatheredWeights::NextOfNow() {
  for (Next& next : now_->next) {
    if (next.before == before_ && next.training == training_) return next;
  }
  return now_->next.emplace_back(Next{.before = before_, .training = training_});
}

// Notes that `bundle` is leased. One that is leased twice in a row, as where a layer is computed
// again, counts once.
void GatheredWeights::Follow(Bundle& bundle, const Pass& pass) {
  const Site& site = pass.site;
  const bool training = pass.batch.mode == Mode::kTraining;
  const bool same_step = now_ != nullptr && site.step == site_.step && training == training_;
  const bool same_round = same_step && site.round == site_.round;
  bundle.layer = site.layer;
  if (same_round && &bundle == now_) return;
  if (same_step) {
    Next& next = NextOfNow();
    next.bundle = &bundle;
    next.next_round = !same_round;
  } else if (training) {
    rounds_ = 0;
  }
  if (training && !same_round) ++rounds_;
  before_ = same_round ? now_ : nullptr;
  now_ = &bundle;
  site_ = site;
  training_ = training;
}

absl::Status GatheredWeights::GatherNext(const Site& site) {
  const Next& known = NextOfNow();
  Bundle* const next = known.bundle;
  if (next == nullptr || next->block >= 0) return absl::OkStatus();
  if (known.next_round && (!training_ || rounds_ >= last_rounds_)) return absl::OkStatus();
  const int block = FreeBlock(/*must=*/false);
  if (block < 0) return absl::OkStatus();
  Site at = site;
  at.layer = next->layer;
  return Gather(*next, block, at);
}

// The block without a lease whose use is longest ago; the second one is made when it is needed,
// more only where they must be.
int GatheredWeights::FreeBlock(bool must) {
  int oldest = -1;
  for (size_t b = 0; b < blocks_.size(); ++b) {
    if (blocks_[b].leases > 0) continue;
    if (oldest < 0 || blocks_[b].used < blocks_[static_cast<size_t>(oldest)].used) {
      oldest = static_cast<int>(b);
    }
  }
  const bool more = blocks_.size() < 2 || (oldest < 0 && must);
  if (!more) return oldest;
  blocks_.emplace_back();
  return static_cast<int>(blocks_.size()) - 1;
}

absl::Status GatheredWeights::Gather(Bundle& bundle, int to, const Site& site) {
  Block& block = blocks_[static_cast<size_t>(to)];
  if (block.bundle != nullptr) std::exchange(block.bundle, nullptr)->block = -1;
  if (!std::exchange(bundle.gathered, true)) ++gathered_bundles_;
  largest_bytes_ = std::max(largest_bytes_, bundle.bytes);
  largest_elements_ = std::max(largest_elements_, bundle.elements);
  if (block.memory.bytes() < largest_bytes_) {
    // In the first steps: what computes or travels may use the memory.
    MOE_RETURN_IF_ERROR(stream_.Synchronize());
    MOE_RETURN_IF_ERROR(context_.compute->Synchronize());
    block.memory = Buffer();
    MOE_ASSIGN_OR_RETURN(block.memory,
                         Buffer::Allocate(largest_bytes_, *context_.memory, "gathered weights"));
  }
  const auto memory = block.memory.span<uint8_t>();
  for (const Run& run : bundle.runs) {
    MOE_RETURN_IF_ERROR(gather_.Start(
        {.bucket = run.bucket,
         .own = run.own,
         .all = memory.subspan(static_cast<size_t>(run.first_byte), static_cast<size_t>(run.bytes)),
         .part_bytes = run.part_bytes},
        site));
  }
  MOE_ASSIGN_OR_RETURN(block.gathered, stream_.Record());
  block.joined = false;
  block.used = ++uses_;
  block.bundle = &bundle;
  bundle.block = to;
  return absl::OkStatus();
}

// Makes the values readable for what is enqueued from now on.
absl::Status GatheredWeights::Show(Bundle& bundle, const Site& site) {
  Block& block = blocks_[static_cast<size_t>(bundle.block)];
  block.used = ++uses_;
  if (!block.joined) {
    MOE_RETURN_IF_ERROR(Timed(context_, site, {.name = "wait for weights"}, *context_.compute,
                              [&] { return context_.compute->WaitFor(block.gathered); }));
    block.joined = true;
  }
  for (const Tensor& tensor : bundle.tensors) {
    Residence& residence = ResidenceOf(*tensor.parameter);
    if (residence.leases > 0) continue;  // another block has it
    residence.block = bundle.block;
    store_.SetValues(*tensor.parameter, block.memory.span<const std::byte>().subspan(
                                            static_cast<size_t>(tensor.first_byte),
                                            static_cast<size_t>(tensor.bytes)));
  }
  return std::exchange(bundle.rounded, true) ? absl::OkStatus() : RoundVectors(bundle);
}

// Vectors are gathered as float32; layers may read them in 16 bits, too.
absl::Status GatheredWeights::RoundVectors(const Bundle& bundle) {
  if (store_.compute() == DType::kFloat32) return absl::OkStatus();
  const WorkspaceScope scope(*context_.host_workspace);
  MOE_ASSIGN_OR_RETURN(auto parts,
                       context_.host_workspace->Array<MasterPart>(std::ssize(bundle.tensors)));
  auto to = parts.begin();
  for (const Tensor& tensor : bundle.tensors) {
    if (!tensor.parameter->is_vector()) continue;
    *to++ = {tensor.parameter, 0, tensor.parameter->vector()};
  }
  parts.remove_suffix(static_cast<size_t>(parts.end() - to));
  return store_.RefreshParts(parts, context_);
}

}  // namespace moe
