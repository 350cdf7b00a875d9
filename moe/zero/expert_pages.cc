// Experts of a WeightPager: which are read, in whose place, and when they are computed.
#include <algorithm>
#include <utility>

#include <absl/container/inlined_vector.h>

#include "moe/zero/weight_pager.h"

namespace moe {

// nullptr: leases use all that the page's layer may take. A layer has two frames or more, so that
// one is read while the other is used, whatever its share.
WeightPager::Frame* WeightPager::FreeExpertFrame(const Page& page) {
  const int64_t share = std::ssize(expert_frames_) / expert_layers_;
  const bool takes_own = module_held_[page.module] >= std::max<int64_t>(2, share);
  Frame* best = nullptr;
  std::pair<int, int64_t> best_rank;
  for (Frame& frame : expert_frames_) {
    int of_class = 0;  // empty, then of a layer with more than its share, then of any
    if (frame.page != kNone) {
      const Page& has = pages_[static_cast<size_t>(frame.page)];
      if (has.leases > 0 || (takes_own && has.module != page.module)) continue;
      of_class = module_held_[has.module] > share ? 1 : 2;
    }
    const std::pair<int, int64_t> rank(of_class, frame.used);
    if (best != nullptr && best_rank <= rank) continue;
    best = &frame;
    best_rank = rank;
  }
  return best;
}

absl::Status WeightPager::ForExperts(const Pass& pass, const ExpertRows& experts,
                                     ComputeExperts compute) {
  const auto page_of = [&](int e) {
    return PageOf(*experts.weights[static_cast<size_t>(e)]);
  };
  if (room_.all_experts || experts.first == experts.last || page_of(experts.first) == nullptr) {
    return compute(experts.first, experts.last);
  }
  absl::InlinedVector<int, 64> wanted;
  for (int e = experts.first; e < experts.last; ++e) {
    if (experts.offsets[static_cast<size_t>(e)] == experts.offsets[static_cast<size_t>(e) + 1]) {
      continue;
    }
    wanted.push_back(e);
    const Page& page = *page_of(e);
    if (page.frame != kNone) FrameOf(page).used = ++uses_;
  }
  const auto is_here = [&](int e) {
    return page_of(e)->frame != kNone;
  };
  std::stable_partition(wanted.begin(), wanted.end(), is_here);
  // Of wanted those before `asked` are in memory or on their way, and held there.
  size_t asked = 0;
  const auto ask = [&] {
    for (; asked < wanted.size(); ++asked) {
      Page& page = *page_of(wanted[asked]);
      if (page.frame != kNone) {
        ++report_.hits;
      } else if (Frame* const frame = FreeExpertFrame(page); frame != nullptr) {
        ++report_.misses;
        Read(page, *frame);
        frame->used = ++uses_;
      } else {
        return;
      }
      ++page.leases;
    }
  };
  absl::Status status;
  size_t next = 0;
  while (next < wanted.size() && status.ok()) {
    ask();
    status = Await(pass, FrameOf(*page_of(wanted[next])));
    if (!status.ok()) break;
    // Neighbours are one product, unless their frames are needed one by one.
    size_t end = next + 1;
    while (asked == wanted.size() && end < asked && wanted[end] == wanted[end - 1] + 1 &&
           IsReady(FrameOf(*page_of(wanted[end])))) {
      ++end;
    }
    for (size_t i = next; i < end; ++i) Show(*page_of(wanted[i]));
    status = compute(wanted[next], wanted[end - 1] + 1);
    status.Update(context_.compute->Synchronize());
    for (; next < end; ++next) {
      Page& page = *page_of(wanted[next]);
      Hide(page);
      --page.leases;
    }
  }
  for (; next < asked; ++next) {  // after an error
    Page& page = *page_of(wanted[next]);
    Await(pass, FrameOf(page)).IgnoreError();
    --page.leases;
  }
  return status;
}

}  // namespace moe
