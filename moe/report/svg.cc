#include "moe/report/svg.h"

#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/report/format.h"

namespace moe::report {
namespace {

// A tenth of a unit is less than a pixel. "12.0" is written "12".
std::string Coordinate(double value) {
  const double tenths = std::round(value * 10);
  if (tenths == 0) return "0";
  if (std::fmod(tenths, 10) == 0) return absl::StrFormat("%.0f", tenths / 10);
  return absl::StrFormat("%.1f", tenths / 10);
}

std::string Corner(Place corner, double width, double height) {
  return absl::StrCat("x=\"", Coordinate(corner.x), "\" y=\"", Coordinate(corner.y), "\" width=\"",
                      Coordinate(width), "\" height=\"", Coordinate(height), "\"");
}

std::string Title(absl::string_view text) {
  return absl::StrCat("<title>", Escape(text), "</title>");
}

std::string Fill(int colour) {
  return absl::StrFormat("fill=\"#%06x\"", colour);
}

}  // namespace

double TextWidth(absl::string_view text) {
  double letters = 0;
  for (const char c : text) {
    if ((static_cast<uint8_t>(c) & 0xC0) != 0x80) ++letters;  // UTF-8: continuations count nothing
  }
  return letters * kLetterWidth;
}

std::string LinePath(absl::Span<const Place> places) {
  std::string path;
  for (const Place& p : places) {
    absl::StrAppend(&path, path.empty() ? "M" : "L", Coordinate(p.x), " ", Coordinate(p.y));
  }
  return path;
}

std::string ShapePath(int index, Place centre, double radius) {
  const auto outline = [&](absl::Span<const Place> corners) {
    std::vector<Place> places;
    for (const Place& c : corners) {
      places.push_back({centre.x + c.x * radius, centre.y + c.y * radius});
    }
    return LinePath(places) + "Z";
  };
  switch (index % kNumShapes) {
    case 1:  // square
      return outline({{-.9, -.9}, {.9, -.9}, {.9, .9}, {-.9, .9}});
    case 2:  // triangle
      return outline({{0, -1.2}, {1.1, .8}, {-1.1, .8}});
    case 3:  // diamond
      return outline({{0, -1.3}, {1.3, 0}, {0, 1.3}, {-1.3, 0}});
    case 4:  // triangle, point down
      return outline({{0, 1.2}, {1.1, -.8}, {-1.1, -.8}});
    case 5:  // plus
      return outline({{-.4, -1.2},
                      {.4, -1.2},
                      {.4, -.4},
                      {1.2, -.4},
                      {1.2, .4},
                      {.4, .4},
                      {.4, 1.2},
                      {-.4, 1.2},
                      {-.4, .4},
                      {-1.2, .4},
                      {-1.2, -.4},
                      {-.4, -.4}});
    default: {  // circle
      const std::string r = Coordinate(radius);
      const std::string across = Coordinate(2 * radius);
      return absl::StrCat("M", Coordinate(centre.x - radius), " ", Coordinate(centre.y), "a", r,
                          " ", r, " 0 1 0 ", across, " 0a", r, " ", r, " 0 1 0 -", across, " 0Z");
    }
  }
}

Svg::Svg(double width, double height, absl::string_view label)
    : head_(
          absl::StrCat("<svg class=\"drawing\" xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 ",
                       Coordinate(width), " ", Coordinate(height), "\" role=\"img\"")),
      label_(Escape(label)) {}

void Svg::Line(absl::string_view classes, Place from, Place to) {
  absl::StrAppend(&body_, "<line class=\"", classes, "\" x1=\"", Coordinate(from.x), "\" y1=\"",
                  Coordinate(from.y), "\" x2=\"", Coordinate(to.x), "\" y2=\"", Coordinate(to.y),
                  "\"/>\n");
}

void Svg::Path(absl::string_view classes, absl::string_view path) {
  absl::StrAppend(&body_, "<path class=\"", classes, "\" d=\"", path, "\"/>\n");
}

void Svg::Text(absl::string_view classes, Place at, Anchor anchor, absl::string_view text) {
  constexpr const char* kAnchors[] = {"start", "middle", "end"};
  absl::StrAppend(&body_, "<text class=\"", classes, "\" x=\"", Coordinate(at.x), "\" y=\"",
                  Coordinate(at.y), "\" text-anchor=\"", kAnchors[static_cast<int>(anchor)], "\">",
                  Escape(text), "</text>\n");
}

void Svg::Rectangle(absl::string_view classes, Place corner, double width, double height) {
  absl::StrAppend(&body_, "<rect class=\"", classes, "\" ", Corner(corner, width, height), "/>\n");
}

void Svg::PathMark(absl::string_view classes, absl::string_view path, absl::string_view tooltip) {
  ++num_marks_;
  absl::StrAppend(&body_, "<path class=\"mark ", classes, "\" d=\"", path, "\">", Title(tooltip),
                  "</path>\n");
}

void Svg::RectangleMark(absl::string_view classes, Place corner, double width, double height,
                        absl::string_view tooltip) {
  ++num_marks_;
  absl::StrAppend(&body_, "<rect class=\"mark ", classes, "\" ", Corner(corner, width, height), ">",
                  Title(tooltip), "</rect>\n");
}

void Svg::ColouredMark(int colour, Place corner, double width, double height,
                       absl::string_view tooltip) {
  ++num_marks_;
  absl::StrAppend(&body_, "<rect class=\"mark\" ", Fill(colour), " ", Corner(corner, width, height),
                  ">", Title(tooltip), "</rect>\n");
}

void Svg::ColouredRectangle(int colour, Place corner, double width, double height) {
  absl::StrAppend(&body_, "<rect ", Fill(colour), " ", Corner(corner, width, height), "/>\n");
}

std::string Svg::Element() const {
  return absl::StrCat(head_, " data-marks=\"", num_marks_, "\" aria-label=\"", label_, "\">\n",
                      body_, "</svg>\n");
}

}  // namespace moe::report
