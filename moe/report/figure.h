// What all charts share: a figure of the page with heading, drawing and legend; the frame of axes.
#ifndef MOE_MOE_REPORT_FIGURE_H_
#define MOE_MOE_REPORT_FIGURE_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/report/scale.h"
#include "moe/report/svg.h"

namespace moe::report {

// Drawings are this wide. On a phone they shrink by a tenth or two, which kFontSize allows for.
inline constexpr double kDrawingWidth = 420;

struct ChartText {
  std::string id;     // of the element, from this program: letters, digits, '-'
  std::string title;  // what is shown
  std::string note;   // how to read it: one or two sentences, or empty
};

// How the series number `index` looks: colours repeat after eight, shapes after six, so that the
// first 24 differ in one of them.
std::string SeriesClass(int index);
// The same with a dash pattern, for curves without points: they repeat after four.
std::string CurveClass(int index);

enum class LegendKey : uint8_t { kPoint, kLine, kCurve, kLimit, kBlock };
struct LegendEntry {
  int series = 0;
  LegendKey key = LegendKey::kPoint;
  std::string name;
};

// The figure as HTML. The legend stands below the drawing as text, so that it wraps on a phone.
std::string Figure(const ChartText& text, const Svg& drawing, absl::Span<const LegendEntry> legend);

// The rectangle that values are drawn into, its axes, grid and tick labels.
class Frame {
 public:
  // `top` is where the drawing may begin; the y label takes the line there. Tick labels that would
  // touch are left out.
  Frame(const Scale& x, const Scale& y, double top, double height);

  Place At(double x, double y) const;
  void Draw(Svg& svg, absl::string_view x_label, absl::string_view y_label) const;
  double left() const { return left_; }
  double right() const { return right_; }
  double top() const { return top_; }
  double bottom() const { return bottom_; }

 private:
  void DrawX(Svg& svg) const;
  void DrawY(Svg& svg) const;

  const Scale& x_;
  const Scale& y_;
  double left_, right_, top_, bottom_;
};

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_FIGURE_H_
