// Colours that people with any colour vision tell apart, on light and on dark pages.
#ifndef MOE_MOE_REPORT_PALETTE_H_
#define MOE_MOE_REPORT_PALETTE_H_

namespace moe::report {

// Red, green, blue: 0xRRGGBB.
struct Ink {
  int light;  // on kPaperInk.light
  int dark;   // on kPaperInk.dark
};

inline constexpr Ink kPaperInk = {0xFFFFFF, 0x15181C};
inline constexpr Ink kGroundInk = {0xF6F7F9, 0x0D0F12};  // around figures
inline constexpr Ink kLineInk = {0xDDE1E6, 0x30363D};    // grids and borders
inline constexpr Ink kTextInk = {0x1B1F24, 0xE6E9ED};
inline constexpr Ink kFaintInk = {0x57606A, 0xA3ADB8};

// The hues of Okabe and Ito (2008). Where one has less than 3:1 against the paper (WCAG 2.1,
// 1.4.11), it is darkened or lightened until it has.
inline constexpr int kNumInks = 8;
inline constexpr Ink kSeriesInk[kNumInks] = {
    {0x0072B2, 0x3D9BD6},  // blue
    {0xD55E00, 0xE8702A},  // vermilion
    {0x008F68, 0x00B386},  // bluish green
    {0xB8608F, 0xCC79A7},  // reddish purple
    {0xA87400, 0xE69F00},  // orange
    {0x2D8CC4, 0x56B4E9},  // sky blue
    {0x857C00, 0xF0E442},  // yellow
    {0x000000, 0xFFFFFF},  // black
};

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_PALETTE_H_
