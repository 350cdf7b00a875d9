// Drawings of the page: SVG, its colours, the scales of axes, and what all charts share.
#ifndef MOE_MOE_CLI_REPORT_DRAWING_H_
#define MOE_MOE_CLI_REPORT_DRAWING_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::report {

// Size of letters in the drawing's units, which the page shows about one to one.
inline constexpr double kFontSize = 13;
// Of digits and letters on the average; wide enough that estimates err on the safe side.
inline constexpr double kLetterWidth = 7.8;
double TextWidth(absl::string_view text);

struct Place {
  double x = 0, y = 0;
};

enum class Anchor : uint8_t { kStart, kMiddle, kEnd };

// Shapes tell series apart where colours do not.
inline constexpr int kNumShapes = 6;
// The outline of shape `index` modulo kNumShapes around `centre`.
std::string ShapePath(int index, Place centre, double radius);
// "M x y L x y ...".
std::string LinePath(absl::Span<const Place> places);

// What stands for a value is a mark: it has the class "mark", and the drawing knows their number,
// so that a reader of the page can tell that none was lost. `classes` are CSS classes and come from
// this program, never from an input.
class Svg {
 public:
  // `label` describes the drawing to those who cannot see it.
  Svg(double width, double height, absl::string_view label);

  void Line(absl::string_view classes, Place from, Place to);
  void Path(absl::string_view classes, absl::string_view path);
  void Text(absl::string_view classes, Place at, Anchor anchor, absl::string_view text);

  // Marks. `tooltip` appears under the pointer.
  void PathMark(absl::string_view classes, absl::string_view path, absl::string_view tooltip);
  void RectangleMark(absl::string_view classes, Place corner, double width, double height,
                     absl::string_view tooltip);
  // 0xRRGGBB, the same on light and dark pages.
  void ColouredMark(int colour, Place corner, double width, double height,
                    absl::string_view tooltip);
  // A swatch of a colour scale: not a mark.
  void ColouredRectangle(int colour, Place corner, double width, double height);

  // The whole element, with data-marks.
  std::string Element() const;

 private:
  void Mark(absl::string_view element, absl::string_view classes, absl::string_view attributes,
            absl::string_view tooltip);

  const std::string head_, label_;
  std::string body_;
  int num_marks_ = 0;
};

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

enum class ScaleKind : uint8_t {
  kLinear,  // ticks at 1, 2 or 5 times a power of ten
  kWhole,   // the same, ticks at whole numbers only
  kLog,     // powers of ten; over less than two of them also 2 and 5 times those
  kBytes,   // logarithmic, ticks at powers of two: "4 KiB"
};

struct Tick {
  double value = 0;
  std::string label;
};

// Covers its data from tick to tick, so that every value stands between two labels.
class Scale {
 public:
  // Of values in [low, high], with about `num_ticks` ticks (at most one and a half times as many).
  // One value alone, or none (low > high), gets a scale around it. Logarithmic scales need low > 0;
  // otherwise the scale is linear.
  static Scale Of(ScaleKind kind, double low, double high, int num_ticks);
  // Of categories, at 0, 1, 2, ..., half a category from either end.
  static Scale OfCategories(absl::Span<const std::string> names);

  // The place of `value` from 0 (low) to 1 (high).
  double Place(double value) const;
  const std::vector<Tick>& ticks() const { return ticks_; }
  double low() const { return low_; }
  double high() const { return high_; }

 private:
  void MakeLinear(double low, double high, int num_ticks, bool whole);
  void MakeLog(double low, double high, int num_ticks);
  void MakeBytes(double low, double high, int num_ticks);

  bool logarithmic_ = false;
  double low_ = 0, high_ = 1;
  std::vector<Tick> ticks_;
};

// Every how many ticks of a level axis of this length have a label, so that none touch.
size_t LabelStride(const Scale& scale, double length);

// Drawings are this wide. On a phone they shrink by a tenth or two, which kFontSize allows for;
// where there is room they grow to what leaves their letters smaller than the headings (kStyle in
// page.cc).
inline constexpr double kDrawingWidth = 420;

struct ChartText {
  std::string id;     // of the element, from this program: letters, digits, '-'
  std::string title;  // what is shown
  std::string note;   // how to read it: one or two sentences, or empty

  // Says in the note what is not drawn: "Not drawn: 2 of 26 points (failed)." 0: nothing.
  void LeaveOut(size_t count, size_t of, absl::string_view things, absl::string_view why);
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
  const Scale& x_;
  const Scale& y_;
  double left_, right_, top_, bottom_;
};

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_DRAWING_H_
