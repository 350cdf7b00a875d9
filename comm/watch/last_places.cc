#include "comm/watch/last_places.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <new>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "comm/wait_report.h"
#include "comm/watch/shared_field.h"
#include "kernels/base/trace.h"

namespace moe {
namespace {

static_assert(std::atomic<uint64_t>::is_always_lock_free);

// The text, cut where it is too long, and zeros behind it.
class Text {
 public:
  void Set(const char* text) {
    Words words = {};
    std::memcpy(words.data(), text, strnlen(text, sizeof words - 1));
    for (size_t i = 0; i < words.size(); ++i) Store(words_[i], words[i]);
  }
  std::string Get() const {
    Words words = {};
    for (size_t i = 0; i < words.size(); ++i) words[i] = Load(words_[i]);
    std::array<char, sizeof words> text = {};
    std::memcpy(text.data(), words.data(), text.size() - 1);
    return text.data();
  }

 private:
  using Words = std::array<uint64_t, 3>;
  std::array<std::atomic<uint64_t>, 3> words_ = {};
};

class Slot {
 public:
  void Set(const char* operation, const Site& site) {
    uint64_t version = version_.load(std::memory_order_relaxed);
    if (version % 2 != 0 ||
        !version_.compare_exchange_strong(version, version + 1, std::memory_order_acquire)) {
      return;  // another thread is writing
    }
    operation_.Set(operation);
    site_.Set(site.name);
    Store(layer_, site.layer);
    Store(step_, site.step);
    Store(at_ns_, MonotonicNs());
    Store(version_, version + 2);
  }
  std::optional<Place> Get() const {
    const uint64_t version = Load(version_);
    Place place = {.operation = operation_.Get(),
                   .site = site_.Get(),
                   .layer = Load(layer_),
                   .step = Load(step_),
                   .at_ns = Load(at_ns_)};
    const bool whole = version % 2 == 0 && version_.load(std::memory_order_relaxed) == version;
    if (!whole || version == 0) return std::nullopt;
    return place;
  }

 private:
  std::atomic<uint64_t> version_{0};  // odd while the fields are written
  Text operation_, site_;
  std::atomic<int32_t> layer_{-1};
  std::atomic<int64_t> step_{-1}, at_ns_{0};
};

}  // namespace

struct LastPlaces::Memory {
  Slot outside, collective;
};

std::string TextOf(const Place& place) {
  return DescribeCall(place.operation,
                      {.name = place.site.c_str(), .layer = place.layer, .step = place.step});
}

LastPlaces::LastPlaces() : file_(::memfd_create("moe-places", MFD_CLOEXEC)) {
  void* mapped = MAP_FAILED;
  if (::posix_fallocate(file_.number(), 0, sizeof(Memory)) == 0) {
    mapped = ::mmap(nullptr, sizeof(Memory), PROT_READ | PROT_WRITE, MAP_SHARED, file_.number(), 0);
  }
  mapped_ = mapped != MAP_FAILED;
  if (!mapped_) {
    file_ = Descriptor();
    mapped = ::operator new(sizeof(Memory));
  }
  memory_ = new (mapped) Memory();
}

LastPlaces::LastPlaces(Memory* mapped) : memory_(mapped) {}

std::unique_ptr<LastPlaces> LastPlaces::Open(const Descriptor& file) {
  struct stat about = {};
  if (::fstat(file.number(), &about) != 0 || about.st_size != sizeof(Memory)) return nullptr;
  void* const mapped = ::mmap(nullptr, sizeof(Memory), PROT_READ, MAP_SHARED, file.number(), 0);
  if (mapped == MAP_FAILED) return nullptr;
  return std::unique_ptr<LastPlaces>(new LastPlaces(static_cast<Memory*>(mapped)));
}

LastPlaces::~LastPlaces() {
  if (mapped_) {
    ::munmap(memory_, sizeof(Memory));
  } else {
    ::operator delete(memory_);
  }
}

void LastPlaces::Mark(const Site& site) {
  memory_->outside.Set("", site);
}

void LastPlaces::Call(const char* operation, const Site& site) {
  memory_->collective.Set(operation, site);
}

std::optional<Place> LastPlaces::Outside() const {
  return memory_->outside.Get();
}

std::optional<Place> LastPlaces::Latest() const {
  std::optional<Place> outside = Outside(), collective = memory_->collective.Get();
  if (!outside.has_value()) return collective;
  return collective.has_value() && collective->at_ns > outside->at_ns ? collective : outside;
}

}  // namespace moe
