// Offsets of groups of rows, known to the host, to kernels, or to both.
#ifndef MOE_KERNELS_BASE_GROUP_OFFSETS_H_
#define MOE_KERNELS_BASE_GROUP_OFFSETS_H_

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include <absl/types/span.h>

namespace moe {

// [G + 1] offsets: group g owns rows [offset g, offset g + 1). A view, like absl::Span.
class GroupOffsets {
 public:
  GroupOffsets() = default;
  // Offsets in host memory; an operation on a CUDA device uploads those that its kernels need.
  template <std::convertible_to<absl::Span<const int64_t>> Offsets>
  GroupOffsets(const Offsets& host) : host_(host) {}                  // NOLINT: a span
  GroupOffsets(std::initializer_list<int64_t> host) : host_(host) {}  // NOLINT: a span
  // Offsets on the device and on the host; `host` is empty where only the device knows them. They
  // may then end before the last row.
  static GroupOffsets OnDevice(absl::Span<const int64_t> device, absl::Span<const int64_t> host) {
    GroupOffsets offsets(host);
    offsets.device_ = device;
    return offsets;
  }

  // Offsets [first, first + count), over the same rows.
  GroupOffsets subspan(size_t first, size_t count) const {
    const auto cut = [&](absl::Span<const int64_t> all) {
      return all.empty() ? all : all.subspan(first, count);
    };
    return OnDevice(cut(device_), cut(host_));
  }

  size_t size() const { return known_to_host() ? host_.size() : device_.size(); }  // G + 1
  bool known_to_host() const { return !host_.empty(); }
  absl::Span<const int64_t> host() const { return host_; }
  absl::Span<const int64_t> device() const { return device_; }  // empty: not on the device yet

 private:
  absl::Span<const int64_t> host_, device_;
};

}  // namespace moe

#endif  // MOE_KERNELS_BASE_GROUP_OFFSETS_H_
