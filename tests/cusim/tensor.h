// Tensor cores and the instructions that feed them, in software: mma.sync, ldmatrix and cp.async.
#ifndef MOE_TESTS_CUSIM_TENSOR_H_
#define MOE_TESTS_CUSIM_TENSOR_H_

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "tests/cusim/device.h"

namespace cusim {

// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32:
// d (16 x 8, float32) += a (16 x 16, T) * b (16 x 8, T), by all 32 lanes of a warp; T: a 16-bit
// type that a float converts to. A register of `a` or `b` holds two values, the lower half first.
// With g = lane / 4, t = lane % 4 (PTX ISA, "Matrix Fragments for mma.m16n8k16"):
//   a[0], a[1]  rows g and g + 8, columns 2t, 2t + 1     a[2], a[3]  the same, columns + 8
//   b[0]        rows 2t, 2t + 1 of column g              b[1]        rows + 8
//   d[0], d[1]  row g, columns 2t, 2t + 1                d[2], d[3]  row g + 8
// Terms are added in ascending k, each product exact: a GPU's own order is not specified.
template <typename T>
void MmaM16N8K16(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2],
                 const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const auto lanes = MeetInWarp({"mma.sync", 0xffffffffu, false, {file, line}},
                                Pack(Fragments{{a[0], a[1], a[2], a[3]}, {b[0], b[1]}}));
  const auto half = [](uint32_t pair, int which) {
    return static_cast<float>(std::bit_cast<T>(static_cast<uint16_t>(pair >> which * 16)));
  };
  const auto a_at = [&](int row, int k) {
    const int lane = row % 8 * 4 + k % 8 / 2;
    return half(Unpack<Fragments>(lanes[lane]).a[row / 8 + 2 * (k / 8)], k % 2);
  };
  const auto b_at = [&](int k, int column) {
    const int lane = column * 4 + k % 8 / 2;
    return half(Unpack<Fragments>(lanes[lane]).b[k / 8], k % 2);
  };
  const int group = Lane() / 4, in_group = Lane() % 4;
  for (int i = 0; i < 4; ++i) {
    const int row = group + 8 * (i / 2), column = 2 * in_group + i % 2;
    for (int k = 0; k < 16; ++k) d[i] += a_at(row, k) * b_at(k, column);
  }
}

// ldmatrix.sync.aligned.m8n8.x4.shared.b16 in software.

// The eight 16-bit elements of one row of a matrix.
using MatrixRow = std::array<uint16_t, 8>;

// Loads four 8 x 8 matrices, by all 32 lanes of a warp: `row` of lane l is row l % 8 of matrix l /
// 8. The result has all 32 rows; the lane that passed a row reads it.
inline std::array<MatrixRow, 32> MatrixRows(const char* name, const void* row, Site site) {
  if (reinterpret_cast<uintptr_t>(row) % sizeof(MatrixRow) != 0) {
    KernelFault("misaligned vector access", name, site);
  }
  const auto* const elements = static_cast<const uint16_t*>(row);
  MatrixRow mine;
  for (size_t i = 0; i < mine.size(); ++i) mine[i] = elements[i];
  const auto lanes = MeetInWarp({name, 0xffffffffu, false, site}, Pack(mine));
  std::array<MatrixRow, 32> rows;
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = Unpack<MatrixRow>(lanes[i]);
  return rows;
}

inline uint32_t PairOf(uint16_t low, uint16_t high) {
  return low | static_cast<uint32_t>(high) << 16;
}

// out[j] of lane 4g + t: elements 2t, 2t + 1 of row g of matrix j (PTX ISA, "ldmatrix").
inline void LoadMatrices(const void* row, uint32_t (&out)[4], const char* file = __builtin_FILE(),
                         int line = __builtin_LINE()) {
  const auto rows = MatrixRows("ldmatrix", row, {file, line});
  const int g = Lane() / 4, t = Lane() % 4;
  for (int j = 0; j < 4; ++j) {
    out[j] = PairOf(rows[j * 8 + g][2 * t], rows[j * 8 + g][2 * t + 1]);
  }
}

// .trans: elements 2t, 2t + 1 of column g.
inline void LoadMatricesTransposed(const void* row, uint32_t (&out)[4],
                                   const char* file = __builtin_FILE(),
                                   int line = __builtin_LINE()) {
  const auto rows = MatrixRows("ldmatrix.trans", row, {file, line});
  const int g = Lane() / 4, t = Lane() % 4;
  for (int j = 0; j < 4; ++j) {
    out[j] = PairOf(rows[j * 8 + 2 * t][g], rows[j * 8 + 2 * t + 1][g]);
  }
}

// movmatrix.sync.aligned.m8n8.trans.b16: elements 2t, 2t + 1 of column g of the matrix whose row g
// lane 4g + t holds.
inline uint32_t TransposedMatrix(uint32_t pair, const char* file = __builtin_FILE(),
                                 int line = __builtin_LINE()) {
  const auto lanes = MeetInWarp({"movmatrix", 0xffffffffu, false, {file, line}}, Pack(pair));
  const int g = Lane() / 4, t = Lane() % 4;
  const auto at = [&](int row) {
    return static_cast<uint16_t>(Unpack<uint32_t>(lanes[row * 4 + g / 2]) >> g % 2 * 16);
  };
  return PairOf(at(2 * t), at(2 * t + 1));
}

// cp.async in software: asynchronous copies from global to shared memory.

// The cp.async.* of one thread, an object on its stack. A copy happens as late as allowed: in the
// Wait() that covers its group, never before. So a kernel that does not wait, or waits for one
// group too few, computes with the old contents of shared memory; and ThreadSanitizer sees the
// copy's accesses at the point by which the hardware must have made them.
class AsyncCopies {
 public:
  // cp.async.cg.shared.global, 16 bytes; both addresses must be multiples of 16. The first
  // `source_bytes` are read, the rest are zeros.
  void Copy16(void* shared, const void* global, int source_bytes = 16,
              const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    const auto misaligned = [](const void* p) {
      return reinterpret_cast<uintptr_t>(p) % 16 != 0;
    };
    if (misaligned(shared) || misaligned(global)) {
      KernelFault("misaligned vector access", "cp.async of 16 bytes", {file, line});
    }
    if (source_bytes < 0 || source_bytes > 16) {
      KernelFault("wrong source size", "cp.async of 16 bytes", {file, line});
    }
    open_.push_back({shared, global, source_bytes});
  }

  // cp.async.commit_group
  void Commit() {
    groups_.push_back(open_);
    open_.clear();
  }

  // cp.async.wait_group N: waits until all but the last `pending` groups have arrived.
  void Wait(size_t pending) {
    while (groups_.size() > pending) {
      for (const Copy& copy : groups_.front()) {
        for (int i = 0; i < 16; ++i) {  // in code that the sanitizers instrument
          static_cast<char*>(copy.shared)[i] =
              i < copy.source_bytes ? static_cast<const char*>(copy.global)[i] : char{0};
        }
      }
      groups_.erase(groups_.begin());
    }
  }

 private:
  struct Copy {
    void* shared;
    const void* global;
    int source_bytes;
  };
  std::vector<Copy> open_;
  std::vector<std::vector<Copy>> groups_;
};

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_TENSOR_H_
