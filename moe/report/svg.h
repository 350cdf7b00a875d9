// An SVG drawing, element by element. Every text is escaped here.
#ifndef MOE_MOE_REPORT_SVG_H_
#define MOE_MOE_REPORT_SVG_H_

#include <cstdint>
#include <string>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

namespace moe::report {

// Size of letters in the drawing's units, which the page shows about one to one.
inline constexpr double kFontSize = 14;
// Of digits and letters on the average; wide enough that estimates err on the safe side.
inline constexpr double kLetterWidth = 8.4;
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
  void Rectangle(absl::string_view classes, Place corner, double width, double height);

  // Marks. `tooltip` appears under the pointer.
  void PathMark(absl::string_view classes, absl::string_view path, absl::string_view tooltip);
  void RectangleMark(absl::string_view classes, Place corner, double width, double height,
                     absl::string_view tooltip);
  // 0xRRGGBB, the same on light and dark pages.
  void ColouredMark(int colour, Place corner, double width, double height,
                    absl::string_view tooltip);
  // A swatch of a colour scale: not a mark.
  void ColouredRectangle(int colour, Place corner, double width, double height);

  int num_marks() const { return num_marks_; }
  // The whole element, with data-marks.
  std::string Element() const;

 private:
  const std::string head_, label_;
  std::string body_;
  int num_marks_ = 0;
};

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_SVG_H_
