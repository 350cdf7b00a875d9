#include "kernels/grouped_gemm/gemm_tile_amx.h"

#include <atomic>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/base/status_macros.h"
#include "kernels/grouped_gemm/gemm_dot_avx512.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#define MOE_AMX 1
#define MOE_AMX_TARGET __attribute__((target("amx-tile,amx-bf16")))
#else
#define MOE_AMX 0
#define MOE_AMX_TARGET
#endif

namespace moe::gemm {
namespace {

std::atomic<bool> use_amx = true;
std::atomic<bool> use_checked = false;

constexpr int kTiles = 8;

// The operand of ldtilecfg.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64);

// All tiles are 16 rows of 64 bytes.
constexpr TileConfig WholeTiles() {
  TileConfig config;
  for (int t = 0; t < kTiles; ++t) {
    config.row_bytes[t] = kTerms * sizeof(BFloat16);
    config.rows[t] = kTileSide;
  }
  return config;
}

#if MOE_AMX

bool CpuHasTiles() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  constexpr unsigned kBFloat16 = 1u << 22, kTile = 1u << 24, kSavesState = 1u << 27;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & kSavesState) == 0) return false;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
  if ((d & (kBFloat16 | kTile)) != (kBFloat16 | kTile)) return false;
  // A guest may lack what every processor with tiles has.
  if (!__builtin_cpu_supports("avx512bw") || !__builtin_cpu_supports("avx512vl")) return false;
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  constexpr unsigned kTileState = 3u << 17;
  return (low & kTileState) == kTileState;
}

AmxState AskForTiles() {
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
  if (!CpuHasTiles()) return AmxState::kNoCpu;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0 ? AmxState::kReady
                                                                     : AmxState::kRefused;
}

// The instructions. Tiles are numbers in their text, and memory is not among their operands.
class AmxTiles {
 public:
  template <int kTile>
  MOE_AMX_TARGET inline __attribute__((always_inline)) void Zero() {
    __asm__ volatile("tilezero %%tmm%c0" ::"i"(kTile));
  }
  template <int kTile>
  MOE_AMX_TARGET inline __attribute__((always_inline)) void Load(const void* data, int64_t stride) {
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(data), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kTile>
  MOE_AMX_TARGET inline __attribute__((always_inline)) void Store(void* data, int64_t stride) {
    __asm__ volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(data), "r"(stride), "i"(kTile)
                     : "memory");
  }
  template <int kSums, int kLeft, int kRight>
  MOE_AMX_TARGET inline __attribute__((always_inline)) void Dot() {
    __asm__ volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(kSums), "i"(kLeft),
                     "i"(kRight));
  }
};

#endif  // MOE_AMX

constexpr TileConfig kConfig = WholeTiles();
// What this thread's sessions have configured in software; nullptr: nothing.
thread_local const TileConfig* checked_config = nullptr;

// The same unit in software, one element after the other. Requires a session.
class CheckedTiles {
 public:
  explicit CheckedTiles(const StripProduct& product) : product_(product) {
    MOE_CHECK(checked_config != nullptr);
    config_ = *checked_config;
    MOE_CHECK(config_.palette == 1 && config_.start_row == 0);
    for (int t = 0; t < kTiles; ++t) {
      MOE_CHECK(config_.rows[t] <= 16 && config_.row_bytes[t] <= 64 &&
                config_.row_bytes[t] % 4 == 0);
    }
  }

  template <int kTile>
  void Zero() {
    Used(kTile);
    tile_[kTile] = {};
  }
  template <int kTile>
  void Load(const void* data, int64_t stride) {
    Used(kTile);
    tile_[kTile] = {};
    for (int i = 0; i < config_.rows[kTile]; ++i) {
      const char* const row = static_cast<const char*>(data) + i * stride;
      MOE_CHECK(IsWithin(row, config_.row_bytes[kTile]));
      std::memcpy(tile_[kTile].row[i], row, config_.row_bytes[kTile]);
    }
  }
  template <int kTile>
  void Store(void* data, int64_t stride) {
    Used(kTile);
    for (int i = 0; i < config_.rows[kTile]; ++i) {
      char* const row = static_cast<char*>(data) + i * stride;
      MOE_CHECK(IsSums(row, config_.row_bytes[kTile]));
      std::memcpy(row, tile_[kTile].row[i], config_.row_bytes[kTile]);
    }
  }
  template <int kSums, int kLeft, int kRight>
  void Dot() {
    Used(kSums), Used(kLeft), Used(kRight);
    static_assert(kSums != kLeft && kSums != kRight && kLeft != kRight);
    const int rows = config_.rows[kLeft], words = config_.row_bytes[kLeft] / 4,
              cols = config_.row_bytes[kSums] / 4;
    MOE_CHECK(config_.rows[kSums] == rows && config_.rows[kRight] == words &&
              config_.row_bytes[kRight] / 4 == cols);
    const FlushSubnormals flush(true);
    for (int i = 0; i < rows; ++i) {
      for (int j = 0; j < cols; ++j) {
        float even = 0, odd = 0;
        for (int k = 0; k < words; ++k) {
          const uint32_t x = tile_[kLeft].row[i][k], y = tile_[kRight].row[k][j];
          even = std::fma(Lower(x), Lower(y), even);
          odd = std::fma(Upper(x), Upper(y), odd);
        }
        uint32_t& sum = tile_[kSums].row[i][j];
        sum = std::bit_cast<uint32_t>(std::bit_cast<float>(sum) + (even + odd));
      }
    }
  }

 private:
  struct Rows {
    uint32_t row[16][16] = {};
  };
  static float Lower(uint32_t word) { return std::bit_cast<float>(word << 16); }
  static float Upper(uint32_t word) { return std::bit_cast<float>(word & 0xffff0000u); }

  void Used(int tile) const { MOE_CHECK(config_.rows[tile] > 0); }
  static bool Contains(const void* begin, int64_t bytes, const char* row, int64_t row_bytes) {
    const auto offset = row - static_cast<const char*>(begin);
    return offset >= 0 && offset + row_bytes <= bytes;
  }
  bool IsSums(const char* row, int64_t bytes) const {
    return Contains(product_.sums, kStripSums * int64_t{sizeof(float)}, row, bytes);
  }
  bool IsWithin(const char* row, int64_t bytes) const {
    const int64_t tile = product_.steps * kTileElements * int64_t{sizeof(BFloat16)};
    const int64_t left = (product_.left_tiles - 1) * product_.left_tile +
                         (kTileSide - 1) * product_.left_row +
                         (product_.steps - 1) * product_.left_step + kTerms;
    return IsSums(row, bytes) ||
           Contains(product_.left, left * int64_t{sizeof(BFloat16)}, row, bytes) ||
           Contains(product_.right, product_.right_tiles * tile, row, bytes);
  }

  const StripProduct& product_;
  TileConfig config_;
  Rows tile_[kTiles];
};

// Tiles 0 to 3 are sums, 4 and 5 the left operand's, 6 and 7 the right one's. A step of two by two
// loads one tile for each product: the second-level cache bounds it, not the unit.
template <int kLeft, int kRight, class Unit>
MOE_AMX_TARGET void Multiply(const StripProduct& product, Unit& unit, Prefetchers& prefetchers) {
  constexpr int64_t kRow = kStripSide * sizeof(float), kTileRow = kTerms * sizeof(BFloat16);
  float* const sums = product.sums;
  float* const below = sums + kTileSide * kStripSide;
  if (product.continues) {
    unit.template Load<0>(sums, kRow);
    if constexpr (kRight == 2) unit.template Load<1>(sums + kTileSide, kRow);
    if constexpr (kLeft == 2) unit.template Load<2>(below, kRow);
    if constexpr (kLeft == 2 && kRight == 2) unit.template Load<3>(below + kTileSide, kRow);
  } else {
    unit.template Zero<0>();
    if constexpr (kRight == 2) unit.template Zero<1>();
    if constexpr (kLeft == 2) unit.template Zero<2>();
    if constexpr (kLeft == 2 && kRight == 2) unit.template Zero<3>();
  }
  const BFloat16* left = product.left;
  const BFloat16* right = product.right;
  const int64_t left_row = product.left_row * int64_t{sizeof(BFloat16)};
  Prefetchers ahead = prefetchers;  // in registers: the unit may change any other memory
  for (int64_t s = 0; s < product.steps; ++s) {
    ahead.Burst();
    unit.template Load<6>(right, kTileRow);
    unit.template Load<4>(left, left_row);
    if constexpr (kRight == 2) unit.template Load<7>(right + kTileElements, kTileRow);
    if constexpr (kLeft == 2) unit.template Load<5>(left + product.left_tile, left_row);
    unit.template Dot<0, 4, 6>();
    if constexpr (kRight == 2) unit.template Dot<1, 4, 7>();
    if constexpr (kLeft == 2) unit.template Dot<2, 5, 6>();
    if constexpr (kLeft == 2 && kRight == 2) unit.template Dot<3, 5, 7>();
    left += product.left_step;
    right += kRight * kTileElements;
  }
  prefetchers = ahead;
  unit.template Store<0>(sums, kRow);
  if constexpr (kRight == 2) unit.template Store<1>(sums + kTileSide, kRow);
  if constexpr (kLeft == 2) unit.template Store<2>(below, kRow);
  if constexpr (kLeft == 2 && kRight == 2) unit.template Store<3>(below + kTileSide, kRow);
}

template <class Unit>
void MultiplyAny(const StripProduct& product, Unit& unit, Prefetchers& ahead) {
  switch (product.left_tiles * 2 + product.right_tiles) {
    case 3:
      return Multiply<1, 1>(product, unit, ahead);
    case 4:
      return Multiply<1, 2>(product, unit, ahead);
    case 5:
      return Multiply<2, 1>(product, unit, ahead);
    default:
      return Multiply<2, 2>(product, unit, ahead);
  }
}

}  // namespace

AmxState AmxOfThisCpu() {
#if MOE_AMX
  static const AmxState state = AskForTiles();
  return state;
#else
  return AmxState::kNoCpu;
#endif
}

bool UsesAmx() {
  return AmxOfThisCpu() == AmxState::kReady && use_amx.load(std::memory_order_relaxed);
}

void UseAmx(bool use) {
  use_amx.store(use, std::memory_order_relaxed);
}

bool UsesCheckedTiles() {
  return use_checked.load(std::memory_order_relaxed);
}

void UseCheckedTiles(bool use) {
  use_checked.store(use, std::memory_order_relaxed);
}

void MultiplyOnCheckedTiles(const StripProduct& product, Prefetchers& ahead) {
  CheckedTiles unit(product);
  MultiplyAny(product, unit, ahead);
}

#if MOE_AMX

MOE_AMX_TARGET TileSession::TileSession() : configured_(UsesAmx()) {
  checked_config = &kConfig;
  if (configured_) __asm__ volatile("ldtilecfg %0" ::"m"(kConfig));
}

MOE_AMX_TARGET TileSession::~TileSession() {
  checked_config = nullptr;
  if (configured_) __asm__ volatile("tilerelease");
}

void MultiplyOnAmx(const StripProduct& product, Prefetchers& ahead) {
  AmxTiles unit;
  MultiplyAny(product, unit, ahead);
}

MOE_AMX_TARGET double RunTiles(int64_t steps) {
  const TileSession session;
  AmxTiles unit;
  unit.Zero<4>(), unit.Zero<5>(), unit.Zero<6>(), unit.Zero<7>();
  unit.Zero<0>(), unit.Zero<1>(), unit.Zero<2>(), unit.Zero<3>();
  for (int64_t n = 0; n < steps; ++n) {
    unit.Dot<0, 4, 6>();
    unit.Dot<1, 4, 7>();
    unit.Dot<2, 5, 6>();
    unit.Dot<3, 5, 7>();
  }
  return static_cast<double>(steps) * 4 * 2 * kTileSide * kTileSide * kTerms;
}

#else

TileSession::TileSession() : configured_(false) {
  checked_config = &kConfig;
}
TileSession::~TileSession() {
  checked_config = nullptr;
}

void MultiplyOnAmx(const StripProduct& product, Prefetchers& ahead) {
  MultiplyOnCheckedTiles(product, ahead);
}

double RunTiles(int64_t) {
  return 0;
}

#endif  // MOE_AMX

}  // namespace moe::gemm
