#include <algorithm>
#include <cmath>
#include <iterator>

#include <absl/strings/str_cat.h>

#include "moe/cli/report/charts.h"
#include "moe/cli/report/drawing.h"
#include "moe/cli/report/format.h"

namespace moe::report {
namespace {

constexpr double kTop = 24;
constexpr double kCellsHeight = 200;
constexpr double kHeight = 308;
constexpr int kColourSteps = 40;

// 1, 2, 5, 10, 20, ...
size_t NextStride(size_t stride) {
  size_t lead = stride;
  while (lead >= 10) lead /= 10;
  return lead == 2 ? stride / 2 * 5 : stride * 2;
}

class HeatMapDrawing {
 public:
  explicit HeatMapDrawing(const HeatMap& map)
      : map_(map),
        colours_(Scale::Of(ScaleKind::kLinear, 0, Largest(map), 4)),
        svg_(kDrawingWidth, kHeight, map.text.title) {
    double widest = 0;
    for (const HeatMapLine& row : map.rows) widest = std::max(widest, TextWidth(row.label));
    left_ = widest + 6;
  }

  std::string Run() {
    svg_.Text("label", {0, kTop - 10}, Anchor::kStart, map_.y_label);
    DrawCells();
    DrawRowLabels();
    DrawColumnLabels();
    DrawColourScale();
    return Figure(map_.text, svg_, {});
  }

 private:
  static double Largest(const HeatMap& map) {
    double largest = 2 * map.middle;
    for (const double value : map.values) {
      if (!std::isnan(value)) largest = std::max(largest, value);
    }
    return largest;
  }
  double CellWidth() const { return (kRight - left_) / static_cast<double>(map_.columns.size()); }
  double CellHeight() const { return kCellsHeight / static_cast<double>(map_.rows.size()); }

  void DrawCells() {
    for (size_t r = 0; r < map_.rows.size(); ++r) {
      for (size_t c = 0; c < map_.columns.size(); ++c) {
        const double value = map_.values[r * map_.columns.size() + c];
        if (std::isnan(value)) continue;
        // Ends are computed, not added up, so that neighbours share them.
        const Place corner = {left_ + static_cast<double>(c) * CellWidth(),
                              kTop + static_cast<double>(r) * CellHeight()};
        svg_.ColouredMark(HeatColour(colours_.Place(value)), corner, CellWidth() + 0.1,
                          CellHeight() + 0.1,
                          absl::StrCat(map_.rows[r].tooltip, ", ", map_.columns[c].tooltip, ": ",
                                       NumberText(value)));
      }
    }
  }

  void DrawRowLabels() {
    double free_from = 0;
    for (size_t r = 0; r < map_.rows.size(); ++r) {
      const double middle = kTop + (static_cast<double>(r) + 0.5) * CellHeight();
      if (middle < free_from) continue;
      free_from = middle + kFontSize + 1;
      svg_.Text("tick", {left_ - 6, middle + 0.35 * kFontSize}, Anchor::kEnd, map_.rows[r].label);
    }
  }

  void DrawColumnLabels() {
    constexpr double kY = kTop + kCellsHeight;
    double widest = 0;
    for (const HeatMapLine& column : map_.columns)
      widest = std::max(widest, TextWidth(column.label));
    size_t every = 1;
    while (static_cast<double>(every) * CellWidth() < widest + 10) every = NextStride(every);
    for (size_t c = 0; c < map_.columns.size(); c += every) {
      const double middle = left_ + (static_cast<double>(c) + 0.5) * CellWidth();
      svg_.Line("axis", {middle, kY}, {middle, kY + 4});
      if (middle + TextWidth(map_.columns[c].label) / 2 > kDrawingWidth) continue;
      svg_.Text("tick", {middle, kY + 17}, Anchor::kMiddle, map_.columns[c].label);
    }
    svg_.Text("label", {(left_ + kRight) / 2, kY + 34}, Anchor::kMiddle, map_.x_label);
  }

  void DrawColourScale() {
    constexpr double kY = kTop + kCellsHeight + 45;
    // The last label is centred below its tick.
    const double right =
        std::min(kRight, kDrawingWidth - TextWidth(colours_.ticks().back().label) / 2);
    const double width = (right - left_) / 2;
    const double from = right - width;
    for (int i = 0; i < kColourSteps; ++i) {
      const double share = (i + 0.5) / kColourSteps;
      svg_.ColouredRectangle(HeatColour(share), {from + width * i / kColourSteps, kY},
                             width / kColourSteps + 0.1, 11);
    }
    svg_.Text("label", {from - 8, kY + 10}, Anchor::kEnd, map_.value_label);
    for (const Tick& tick : colours_.ticks()) {
      const double at = from + width * colours_.Place(tick.value);
      svg_.Line("axis", {at, kY + 11}, {at, kY + 15});
      svg_.Text("tick", {at, kY + 27}, Anchor::kMiddle, tick.label);
    }
  }

  static constexpr double kRight = kDrawingWidth - 8;

  const HeatMap& map_;
  const Scale colours_;
  Svg svg_;
  double left_ = 0;
};

}  // namespace

int HeatColour(double share) {
  constexpr int kStops[][3] = {{0x00, 0x22, 0x4E}, {0x12, 0x35, 0x70}, {0x3B, 0x49, 0x6C},
                               {0x57, 0x5D, 0x6D}, {0x70, 0x71, 0x73}, {0x8A, 0x86, 0x78},
                               {0xA5, 0x9C, 0x74}, {0xC3, 0xB3, 0x69}, {0xE1, 0xCC, 0x55},
                               {0xFE, 0xE8, 0x38}};
  constexpr int kLast = static_cast<int>(std::size(kStops)) - 1;
  if (std::isnan(share)) share = 0;  // of a scale whose ends overflow
  const double at = std::clamp(share, 0.0, 1.0) * kLast;
  const int below = std::min(static_cast<int>(at), kLast - 1);
  int colour = 0;
  for (int i = 0; i < 3; ++i) {
    const double value =
        kStops[below][i] + (at - below) * (kStops[below + 1][i] - kStops[below][i]);
    colour = colour * 256 + static_cast<int>(std::lround(value));
  }
  return colour;
}

std::string Render(const HeatMap& map) {
  return HeatMapDrawing(map).Run();
}

}  // namespace moe::report
