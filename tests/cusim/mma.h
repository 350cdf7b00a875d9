// mma.sync.aligned.m16n8k16.row.col.f32.T.T.f32 in software.
#ifndef MOE_TESTS_CUSIM_MMA_H_
#define MOE_TESTS_CUSIM_MMA_H_

#include <bit>
#include <cstdint>

#include "tests/cusim/device.h"

namespace cusim {

// d (16 x 8, float32) += a (16 x 16, T) * b (16 x 8, T), by all 32 lanes of a warp; T: a 16-bit
// type that a float is made of. A register of `a` or `b` holds two of them, the lower half first.
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

}  // namespace cusim

#endif  // MOE_TESTS_CUSIM_MMA_H_
