// ldmatrix.sync.aligned.m8n8.x4.shared.b16 in software.
#ifndef MOE_TESTS_CUSIM_LDMATRIX_H_
#define MOE_TESTS_CUSIM_LDMATRIX_H_

#include <array>
#include <cstdint>

#include "tests/cusim/device.h"

namespace cusim {

// The eight 16-bit elements of one row of a matrix.
using MatrixRow = std::array<uint16_t, 8>;

// Four 8 x 8 matrices, by all 32 lanes of a warp: `row` of lane l is row l % 8 of matrix l / 8. The
// result has all 32 rows; each is read by the lane that names it.
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

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_LDMATRIX_H_
