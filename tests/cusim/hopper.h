// Hopper's instructions in software: barriers that count bytes, bulk tensor copies and warpgroup
// products. Code that accesses a kernel's memory is here, for the sanitizers; async_proxy.h tracks
// the state.
#ifndef MOE_TESTS_CUSIM_HOPPER_H_
#define MOE_TESTS_CUSIM_HOPPER_H_

#include <bit>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "tests/cusim/async_proxy.h"
#include "tests/cusim/device.h"

namespace cusim {

// mbarrier.try_wait.parity until it is true.
inline void WaitAtBarrier(void* barrier, uint32_t parity, Site site) {
  BulkCopy copy;
  while (AwaitBarrier(barrier, parity, site, copy)) {
    const TensorMap& map = copy.map;
    const auto inside = [&](int dimension, uint32_t i) {
      const int64_t at = int64_t{copy.from[dimension]} + i;
      return at >= 0 && at < static_cast<int64_t>(map.size[dimension]);
    };
    uint32_t to = copy.to;
    for (uint32_t z = 0; z < map.box[2]; ++z) {
      for (uint32_t y = 0; y < map.box[1]; ++y) {
        for (uint32_t x = 0; x < map.box[0]; ++x, to += 2) {
          const uint32_t address = Swizzled(to);
          const uint32_t in_chunk = address % kChunkBytes;
          uint16_t value = 0;
          if (inside(0, x) && inside(1, y) && inside(2, z)) {
            const auto* const row =
                reinterpret_cast<const char*>(map.data) +
                (copy.from[1] + int64_t{y}) * static_cast<int64_t>(map.stride[1]) +
                (copy.from[2] + int64_t{z}) * static_cast<int64_t>(map.stride[2]);
            value = reinterpret_cast<const uint16_t*>(row)[copy.from[0] + int64_t{x}];
          }
          *reinterpret_cast<uint16_t*>(SharedChunk(address - in_chunk, site) + in_chunk) = value;
        }
      }
    }
    FinishCopy(barrier, copy, site);
  }
}

// An operand of wgmma in shared memory: `rows` (M or N) x 16 (K) elements of 16 bits. PTX ISA,
// "Matrix descriptor format" and "Strides"; a descriptor's fields, in units of 16 bytes:
//   bits 0-13 start   16-29 leading offset   32-45 stride offset   49-51 base
//   62-63 swizzle: 1, of 128 bytes, alone
// K-major: 8 rows of 128 bytes are contiguous, the next 8 rows follow at the stride offset.
// MN-major: 8 of K, each with 64 adjacent rows, are contiguous; the next 8 of K follow at the
// stride offset, the next rows at the leading offset.
struct Operand {
  static constexpr uint32_t kRowBytes = 128;

  uint64_t descriptor;
  bool mn_major;
  int rows;

  uint32_t Field(int bit) const {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) * kChunkBytes;
  }
  // The chunk of element (row, k). A chunk has 8 elements of K, or 8 rows.
  uint32_t ChunkOf(int row, int k) const {
    const auto r = static_cast<uint32_t>(row), depth = static_cast<uint32_t>(k);
    const uint32_t leading = Field(16), stride = Field(32);
    const uint32_t at = mn_major ? r / 64 * leading + depth / 8 * stride + depth % 8 * kRowBytes +
                                       r % 64 / 8 * kChunkBytes
                                 : r / 8 * stride + r % 8 * kRowBytes + depth / 8 * kChunkBytes;
    return Swizzled(Field(0) + at);
  }
  template <typename Visit>
  void ForChunks(Visit visit) const {
    for (int row = 0; row < rows; row += mn_major ? 8 : 1) {
      for (int k = 0; k < 16; k += mn_major ? 1 : 8) visit(ChunkOf(row, k));
    }
  }
  // Without a base offset the pattern of the swizzle begins at a multiple of 8 rows.
  void CheckStart(Site site) const {
    constexpr uint32_t kMask = 8 * kRowBytes - kRowBytes;
    if ((Field(0) & kMask) != 0 || (descriptor >> 49 & 7) != 0 || descriptor >> 62 != 1) {
      KernelFault("misaligned operand", "a swizzled tile must begin at a multiple of 8 rows", site);
    }
  }
};

// The products of one thread that were issued and not waited for. They are computed in the Wait()
// that covers their group, never before: operands are read there, and until then the sums are
// poisoned.
class Products {
 public:
  using Value = float (*)(uint16_t);

  static Products& OfThread() {
    std::shared_ptr<void>& slot = ThreadSlot();
    if (slot == nullptr) slot = std::make_shared<Products>();
    return *static_cast<Products*>(slot.get());
  }

  // wgmma.fence: registers that other code wrote may become sums.
  void Fence() { fenced_ = true; }

  // wgmma.mma_async.m64nNk16: d[4j + 2h + c] of this thread is the sum of row
  // 16 (warp % 4) + lane / 4 + 8h and column 8j + 2 (lane % 4) + c.
  void Issue(float* d, const Operand& a, const Operand& b, bool accumulate, Value value,
             Site site) {
    const uint64_t mode = (accumulate ? 1u : 0u) | (a.mn_major ? 2u : 0u) | (b.mn_major ? 4u : 0u);
    const LaneValue mine = {a.descriptor, b.descriptor, mode, static_cast<uint64_t>(b.rows)};
    for (const LaneValue& other : MeetInWarp({"wgmma", 0xffffffffu, false, site}, mine)) {
      if (other != mine) KernelFault("divergent warp operation", "operands of wgmma differ", site);
    }
    if (Lane() == 0) {
      CountProduct(site);
      for (const Operand& operand : {a, b}) {
        operand.CheckStart(site);
        operand.ForChunks([&](uint32_t chunk) { BeginRead(chunk, site); });
      }
    }
    auto [sums, is_new] = sums_.try_emplace(d);
    const auto n = static_cast<size_t>(b.rows) / 2;
    if (is_new) {
      if (!fenced_) KernelFault("missing wgmma.fence", "before sums that registers hold", site);
      sums->second.values.assign(d, d + n);
      for (size_t i = 0; i < n; ++i) d[i] = Poison();
    }
    ++sums->second.products;
    open_.push_back({d, a, b, accumulate, value, site});
  }

  void Commit() {
    groups_.push_back(open_);
    open_.clear();
  }

  // wgmma.wait_group: waits until all but the last `pending` groups have ended.
  void Wait(size_t pending, Site site) {
    std::vector<Product> ended;
    for (; groups_.size() > pending; groups_.pop_front()) {
      for (const Product& product : groups_.front()) {
        Finish(product);
        ended.push_back(product);
      }
    }
    if (IsLastLane()) {
      for (const Product& product : ended) {
        for (const Operand& operand : {product.a, product.b}) {
          operand.ForChunks([&](uint32_t chunk) { FinishRead(chunk, product.site); });
        }
      }
    }
    // No lane continues before all operands were read.
    MeetInWarp({"wgmma.wait_group", 0xffffffffu, true, site}, {});
  }

 private:
  struct Product {
    float* d;
    Operand a, b;
    bool accumulate;
    Value value;
    Site site;
  };
  struct Sums {
    std::vector<float> values;
    int products = 0;  // not ended yet
  };

  static float Poison() { return std::bit_cast<float>(0x7fc0deadu); }

  static void Read(const Operand& operand, int row, Value value, Site site, float (&out)[16]) {
    for (int k = 0; k < 16; ++k) {
      const auto* const chunk =
          reinterpret_cast<const uint16_t*>(SharedChunk(operand.ChunkOf(row, k), site));
      out[k] = value(chunk[operand.mn_major ? row % 8 : k % 8]);
    }
  }

  void Finish(const Product& p) {
    Sums& sums = sums_.at(p.d);
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp % 4 * 16 + Lane() / 4;
    float a[2][16], b[16];
    for (int h = 0; h < 2; ++h) Read(p.a, row + 8 * h, p.value, p.site, a[h]);
    for (int i = 0; i < p.b.rows / 4; ++i) {
      const int j = i / 2, c = i % 2;
      Read(p.b, 8 * j + 2 * (Lane() % 4) + c, p.value, p.site, b);
      for (int h = 0; h < 2; ++h) {
        float& sum = sums.values[static_cast<size_t>(4 * j + 2 * h + c)];
        if (!p.accumulate) sum = 0;
        for (int k = 0; k < 16; ++k) sum += a[h][k] * b[k];
      }
    }
    if (--sums.products > 0) return;
    for (size_t i = 0; i < sums.values.size(); ++i) {
      if (std::bit_cast<uint32_t>(p.d[i]) != std::bit_cast<uint32_t>(Poison())) {
        KernelFault("sums written in flight", "before wgmma.wait_group", p.site);
      }
      p.d[i] = sums.values[i];
    }
    sums_.erase(p.d);
    fenced_ = false;
  }

  std::vector<Product> open_;
  std::deque<std::vector<Product>> groups_;
  std::map<float*, Sums> sums_;
  bool fenced_ = false;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_HOPPER_H_
