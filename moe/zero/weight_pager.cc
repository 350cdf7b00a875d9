#include "moe/zero/weight_pager.h"

#include <algorithm>
#include <map>
#include <numeric>
#include <system_error>
#include <utility>

#include <absl/strings/str_cat.h>
#include <sys/mman.h>

#include "comm/extremes.h"
#include "kernels/base/status_macros.h"
#include "kernels/base/storage_type.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

constexpr int64_t kUnit = ScratchFile::kAlignment;

int64_t Aligned(int64_t bytes) {
  return (bytes + kUnit - 1) / kUnit * kUnit;
}

// Bytes of whole units of a file that hold `bytes` from any byte on.
int64_t UnitsOf(int64_t bytes) {
  return bytes % kUnit == 0 ? bytes : Aligned(bytes) + kUnit;
}

bool IsExpert(const Parameter& parameter) {
  return parameter.spec().holders == MeshGroup::kExpertData;
}

// Address of what layers read.
const std::byte* ValuesOf(const Parameter& parameter, DType type) {
  return WithStorageType(type, [&]<typename T>(T) {
    return reinterpret_cast<const std::byte*>(parameter.view<T>().row(0));
  });
}

}  // namespace

// The file while it is written, as memory for parameters one behind the other.
class WeightPager::Mapped final : public MemoryResource {
 public:
  Mapped(std::byte* first, int64_t bytes) : first_(first), bytes_(bytes) {}
  ~Mapped() override { ::munmap(first_, static_cast<size_t>(bytes_)); }

  Device device() const override { return {}; }
  absl::StatusOr<std::byte*> Allocate(int64_t bytes) override {
    MOE_CHECK(used_ + bytes <= bytes_);
    return first_ + std::exchange(used_, used_ + Aligned(bytes));
  }
  void Free(std::byte* /*data*/, int64_t /*bytes*/) override {}

  int64_t ByteOf(const std::byte* values) const { return values - first_; }

 private:
  std::byte* const first_;
  const int64_t bytes_;
  int64_t used_ = 0;
};

absl::StatusOr<std::unique_ptr<WeightPager>> WeightPager::Create(
    absl::Span<const std::vector<Parameter*>> modules, ParameterStore& store,
    const Context& context, const WeightFileOptions& options) {
  if (OnCuda(context)) {
    return absl::UnimplementedError(
        "WeightPager: weights are not offloaded from CUDA devices, expected a CPU");
  }
  const int sharing = context.mesh->size(MeshGroup::kExpertTensor);
  if (sharing > 1) {
    return absl::UnimplementedError(absl::StrCat(
        "--offload weights with --etp ", sharing,
        ", expected 1: ranks that share experts compute them at once, whichever are in memory"));
  }
  auto pager = std::unique_ptr<WeightPager>(new WeightPager(store, context, options));
  pager->AddPages(modules);
  const WeightSizes sizes = pager->Sizes();
  MOE_ASSIGN_OR_RETURN(
      const auto least,
      ExtremesOverRanks({LeastMemory(sizes), options.memory_bytes}, context.mesh->world(),
                        *context.host, {.name = "memory for weights"}));
  if (least[0].most > least[1].least) {
    return TooLittleMemory(least[1].least, least[0].most);
  }
  MOE_ASSIGN_OR_RETURN(pager->room_, RoomFor(sizes, options.memory_bytes));
  MOE_RETURN_IF_ERROR(pager->Provide());
  return pager;
}

WeightPager::WeightPager(ParameterStore& store, const Context& context,
                         const WeightFileOptions& options)
    : store_(store), context_(context), options_(options) {}

WeightPager::~WeightPager() {
  if (thread_.joinable()) {
    {
      const std::lock_guard lock(mu_);
      stops_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  if (room_.resident.empty()) return;  // refused: nothing has memory
  for (const Page& page : pages_) {
    for (const Part& part : page.parts) {
      store_.DropMaster(*part.parameter);
      if (Passes(page)) store_.DropValues(*part.parameter);
    }
  }
}

void WeightPager::AddPages(absl::Span<const std::vector<Parameter*>> modules) {
  page_of_.assign(store_.parameters().size(), kNone);
  for (size_t m = 0; m < modules.size(); ++m) {
    std::vector<Parameter*> dense;
    std::map<int, std::vector<Parameter*>> slabs;  // matrices of experts
    bool pages_experts = true;
    for (Parameter* const p : modules[m]) {
      if (page_of_[static_cast<size_t>(p->index())] != kNone) continue;  // tied
      if (IsExpert(*p) && p->spec().cols == 1) pages_experts = false;    // a vector among them
      if (p->is_vector()) continue;
      if (IsExpert(*p)) {
        slabs[p->slab()].push_back(p);
      } else {
        dense.push_back(p);
      }
    }
    AddPage(std::move(dense), m, /*is_expert=*/false);
    const size_t experts = slabs.empty() || !pages_experts ? 0 : slabs.begin()->second.size();
    if (experts > 0) ++expert_layers_;
    for (size_t e = 0; e < experts; ++e) {
      std::vector<Parameter*> of_expert;
      for (const auto& [slab, parameters] : slabs) of_expert.push_back(parameters.at(e));
      AddPage(std::move(of_expert), m, /*is_expert=*/true);
    }
  }
  module_held_.assign(modules.size(), 0);
  for (const std::vector<Parameter*>& module : modules) {
    int last = kNone;
    for (const Parameter* const p : module) {
      const int page = page_of_[static_cast<size_t>(p->index())];
      if (page == kNone || page == last || pages_[static_cast<size_t>(page)].is_expert) continue;
      module_pages_.push_back(last = page);
    }
  }
}

void WeightPager::AddPage(std::vector<Parameter*> parameters, size_t module, bool is_expert) {
  Page page = {.module = module, .is_expert = is_expert};
  for (Parameter* const p : parameters) {
    const int64_t bytes = BytesOf(*p);
    page.parts.push_back({.parameter = p, .bytes = bytes, .frame_byte = page.frame_bytes});
    page.frame_bytes += UnitsOf(bytes);
    page_of_[static_cast<size_t>(p->index())] = static_cast<int>(pages_.size());
  }
  pages_.push_back(std::move(page));
}

WeightPager::Page* WeightPager::PageOf(const Parameter& parameter) {
  const int page = page_of_[static_cast<size_t>(parameter.index())];
  return page == kNone ? nullptr : &pages_[static_cast<size_t>(page)];
}

int64_t WeightPager::BytesOf(const Parameter& parameter) const {
  const int64_t each = SizeOf(store_.compute());
  // Of a vector in 16 bits layers may read both.
  const bool both = parameter.is_vector() && store_.compute() != DType::kFloat32;
  return parameter.size() * (both ? each + SizeOf(DType::kFloat32) : each);
}

WeightSizes WeightPager::Sizes() const {
  WeightSizes sizes;
  for (const auto& p : store_.parameters()) {
    if (page_of_[static_cast<size_t>(p->index())] == kNone) sizes.vector_bytes += BytesOf(*p);
  }
  for (const Page& page : pages_) {
    WeightSizes::Page size = {.frame_bytes = page.frame_bytes + kUnit};  // a frame is aligned
    for (const Part& part : page.parts) size.bytes += part.bytes;
    if (!page.is_expert) {
      sizes.modules.push_back(size);
      continue;
    }
    ++sizes.experts;
    sizes.expert.bytes = std::max(sizes.expert.bytes, size.bytes);
    sizes.expert.frame_bytes = std::max(sizes.expert.frame_bytes, size.frame_bytes);
  }
  return sizes;
}

int64_t WeightPager::SlabBytes(const Parameter& first) const {
  const auto& all = store_.parameters();
  int64_t bytes = 0;
  for (auto p = static_cast<size_t>(first.index());
       p < all.size() && all[p]->slab() == first.slab(); ++p) {
    bytes += BytesOf(*all[p]);
  }
  return Aligned(bytes);
}

// Memory of all parameters, for whoever writes their values.
absl::Status WeightPager::Provide() {
  const int rank = context_.mesh->world().rank();
  const auto passes = [this](const Parameter& p) {
    const Page* const page = PageOf(p);
    return page != nullptr && Passes(*page);
  };
  for (const auto& p : store_.parameters()) {
    if (!passes(*p)) {
      resident_bytes_ += BytesOf(*p);
    } else if (p->index() == p->slab()) {
      file_bytes_ += SlabBytes(*p);
    }
  }
  if (file_bytes_ > 0) {
    MOE_ASSIGN_OR_RETURN(
        file_,
        ScratchFile::Create(options_.folder, absl::StrCat("moe-weights-rank-", rank), file_bytes_));
    MOE_ASSIGN_OR_RETURN(std::byte* const first, file_->Map(file_bytes_));
    mapped_ = std::make_unique<Mapped>(first, file_bytes_);
  }
  masters_ = ScratchMemory(options_.folder, absl::StrCat("moe-masters-rank-", rank));
  for (const auto& p : store_.parameters()) {
    Parameter* const each = p.get();
    MOE_RETURN_IF_ERROR(store_.Provide(
        {&each, 1}, {.values = passes(*p) ? mapped_.get() : nullptr, .masters = masters_.get()}));
  }
  for (Page& page : pages_) {
    if (!Passes(page)) continue;
    for (Part& part : page.parts) {
      part.file_byte = mapped_->ByteOf(ValuesOf(*part.parameter, store_.compute()));
    }
  }
  return absl::OkStatus();
}

absl::Status WeightPager::Begin() {
  for (const Page& page : pages_) {
    for (const Part& part : page.parts) {
      store_.DropMaster(*part.parameter);
      if (Passes(page)) store_.DropValues(*part.parameter);
    }
  }
  mapped_ = nullptr;
  masters_ = nullptr;
  if (!file_.has_value()) return absl::OkStatus();
  MOE_RETURN_IF_ERROR(file_->Flush());
  std::erase_if(module_pages_,
                [&](int page) { return !Passes(pages_[static_cast<size_t>(page)]); });
  const int64_t expert = Sizes().expert.frame_bytes;
  MOE_RETURN_IF_ERROR(MakeFrames(module_frames_, room_.module_frames, room_.module_frame_bytes));
  MOE_RETURN_IF_ERROR(MakeFrames(expert_frames_, room_.expert_frames, expert));
  try {
    thread_ = std::thread([this] { RunRequests(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot start a thread for '", file_->path(), "': ", error.what()));
  }
  return absl::OkStatus();
}

absl::Status WeightPager::MakeFrames(std::deque<Frame>& frames, int64_t count, int64_t bytes) {
  for (int64_t i = 0; i < count; ++i) {
    Frame& frame = frames.emplace_back();
    MOE_ASSIGN_OR_RETURN(frame.memory, Buffer::Allocate(bytes, CpuMemory(), "weights from a file"));
    const auto address = reinterpret_cast<intptr_t>(frame.memory.data());
    frame.first = frame.memory.data() + (Aligned(address) - address);
  }
  return absl::OkStatus();
}

absl::Status WeightPager::Acquire(const Pass& pass, absl::Span<Parameter* const> parameters) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    Page* const page = PageOf(*parameters[i]);
    if (page == nullptr || page->is_expert || !Passes(*page)) continue;
    if (page->leases == 0) {
      if (absl::Status loaded = LoadModule(pass, *page); !loaded.ok()) {
        Release(parameters.first(i));
        return loaded;
      }
    }
    ++page->leases;
  }
  return absl::OkStatus();
}

void WeightPager::Release(absl::Span<Parameter* const> parameters) {
  for (const Parameter* const p : parameters) {
    Page* const page = PageOf(*p);
    if (page == nullptr || page->is_expert || !Passes(*page)) continue;
    if (--page->leases == 0) Hide(*page);
  }
}

absl::Status WeightPager::LoadModule(const Pass& pass, Page& page) {
  if (page.frame == kNone) {
    Frame& frame = *FreeModuleFrame();
    MOE_RETURN_IF_ERROR(Await(pass, frame));  // for a page that was read ahead in vain
    Read(page, frame);
  }
  Frame& frame = FrameOf(page);
  frame.used = ++uses_;
  MOE_RETURN_IF_ERROR(Await(pass, frame));
  Show(page);
  ReadNextModule(page);
  return absl::OkStatus();
}

// In a second frame, while the pass computes with `page`.
void WeightPager::ReadNextModule(const Page& page) {
  const size_t count = module_pages_.size();
  for (size_t i = 0; i < count; ++i) {
    const size_t at = (module_at_ + i) % count;
    if (&pages_[static_cast<size_t>(module_pages_[at])] != &page) continue;
    module_at_ = (at + 1) % count;
    break;
  }
  Page& next = pages_[static_cast<size_t>(module_pages_[module_at_])];
  if (next.frame != kNone || module_frames_.size() < 2) return;
  Frame& here = FrameOf(page);
  Frame& other = &here == &module_frames_[0] ? module_frames_[1] : module_frames_[0];
  if (IsReady(other)) Read(next, other);
}

// That of the page that was used longest ago; no module is leased.
WeightPager::Frame* WeightPager::FreeModuleFrame() {
  return &*std::min_element(module_frames_.begin(), module_frames_.end(),
                            [](const Frame& a, const Frame& b) { return a.used < b.used; });
}

WeightPager::Frame& WeightPager::FrameOf(const Page& page) {
  return (page.is_expert ? expert_frames_ : module_frames_)[static_cast<size_t>(page.frame)];
}

void WeightPager::Read(Page& page, Frame& frame) {
  std::deque<Frame>& frames = page.is_expert ? expert_frames_ : module_frames_;
  if (frame.page != kNone) {
    Page& before = pages_[static_cast<size_t>(frame.page)];
    before.frame = kNone;
    if (before.is_expert) --module_held_[before.module];
  }
  const auto at = std::find_if(frames.begin(), frames.end(),
                               [&](const Frame& each) { return &each == &frame; });
  page.frame = static_cast<int>(at - frames.begin());
  frame.page = page_of_[static_cast<size_t>(page.parts.front().parameter->index())];
  if (page.is_expert) ++module_held_[page.module];
  for (const Part& part : page.parts) report_.bytes_read += part.bytes;
  if (!page.is_expert) ++report_.module_reads;
  {
    const std::lock_guard lock(mu_);
    frame.reading = true;
    requests_.push_back(&frame);
  }
  changed_.notify_all();
}

bool WeightPager::IsReady(const Frame& frame) {
  const std::lock_guard lock(mu_);
  return !frame.reading;
}

absl::Status WeightPager::Await(const Pass& pass, const Frame& frame) {
  if (!IsReady(frame)) {
    const int64_t start_ns = MonotonicNs();
    MOE_RETURN_IF_ERROR(Timed(context_, pass.site, {.name = "wait for weights"}, *context_.compute,
                              [&]() -> absl::Status {
                                std::unique_lock lock(mu_);
                                changed_.wait(lock,
                                              [&] { return !frame.reading || !status_.ok(); });
                                return absl::OkStatus();
                              }));
    report_.wait_seconds += SecondsSince(start_ns);
  }
  const std::lock_guard lock(mu_);
  return status_;
}

void WeightPager::Show(const Page& page) {
  const Frame& frame = FrameOf(page);
  for (const Part& part : page.parts) {
    const std::byte* const first = frame.first + part.frame_byte + part.file_byte % kUnit;
    store_.SetValues(*part.parameter, absl::MakeConstSpan(first, static_cast<size_t>(part.bytes)));
  }
}

void WeightPager::Hide(const Page& page) {
  for (const Part& part : page.parts) {
    store_.SetValues(*part.parameter, absl::Span<const std::byte>());
  }
}

PagingReport WeightPager::report() const {
  PagingReport report = report_;
  report.memory_bytes = resident_bytes_;
  for (const auto* frames : {&expert_frames_, &module_frames_}) {
    for (const Frame& frame : *frames) report.memory_bytes += frame.memory.bytes();
  }
  report.file_bytes = file_bytes_;
  report.experts =
      std::count_if(pages_.begin(), pages_.end(), [](const Page& page) { return page.is_expert; });
  report.experts_in_memory = room_.all_experts ? report.experts : room_.expert_frames;
  return report;
}

absl::Status WeightPager::ReadPage(const Page& page, const Frame& frame) const {
  for (const Part& part : page.parts) {
    const int64_t begin = part.file_byte / kUnit * kUnit;
    const int64_t end = Aligned(part.file_byte + part.bytes);
    MOE_RETURN_IF_ERROR(file_->Read(
        begin, absl::MakeSpan(frame.first + part.frame_byte, static_cast<size_t>(end - begin))));
  }
  return absl::OkStatus();
}

// Runs on the thread.
void WeightPager::RunRequests() {
  std::unique_lock lock(mu_);
  while (true) {
    changed_.wait(lock, [&] { return stops_ || !requests_.empty(); });
    if (stops_ || !status_.ok()) return;
    Frame& frame = *requests_.front();
    requests_.pop_front();
    const Page& page = pages_[static_cast<size_t>(frame.page)];
    lock.unlock();
    const absl::Status done = ReadPage(page, frame);
    lock.lock();
    status_.Update(done);
    frame.reading = false;
    changed_.notify_all();
  }
}

}  // namespace moe
