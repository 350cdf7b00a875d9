#include "moe/cli/report/drawing.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>

#include "moe/cli/report/format.h"

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

void Svg::Mark(absl::string_view element, absl::string_view classes, absl::string_view attributes,
               absl::string_view tooltip) {
  ++num_marks_;
  absl::StrAppend(&body_, "<", element, " class=\"mark", classes.empty() ? "" : " ", classes, "\" ",
                  attributes, "><title>", Escape(tooltip), "</title></", element, ">\n");
}

void Svg::PathMark(absl::string_view classes, absl::string_view path, absl::string_view tooltip) {
  Mark("path", classes, absl::StrCat("d=\"", path, "\""), tooltip);
}

void Svg::RectangleMark(absl::string_view classes, Place corner, double width, double height,
                        absl::string_view tooltip) {
  Mark("rect", classes, Corner(corner, width, height), tooltip);
}

void Svg::ColouredMark(int colour, Place corner, double width, double height,
                       absl::string_view tooltip) {
  Mark("rect", "", absl::StrCat(Fill(colour), " ", Corner(corner, width, height)), tooltip);
}

void Svg::ColouredRectangle(int colour, Place corner, double width, double height) {
  absl::StrAppend(&body_, "<rect ", Fill(colour), " ", Corner(corner, width, height), "/>\n");
}

std::string Svg::Element() const {
  return absl::StrCat(head_, " data-marks=\"", num_marks_, "\" aria-label=\"", label_, "\">\n",
                      body_, "</svg>\n");
}

namespace {

// The smallest of 1, 2, 5 times a power of ten that is not below `step`.
double NiceStep(double step) {
  const double power = std::pow(10, std::floor(std::log10(step)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    // A step of exactly 2 may come out of the division as 2 + 1 ulp.
    if (factor * power >= step * (1 - 1e-9)) return factor * power;
  }
  return 10 * power;
}

// Digits that tell neighbouring ticks apart, and no more.
int DigitsFor(double step, double largest) {
  if (largest <= 0) return 1;
  return std::max(
      1,
      static_cast<int>(std::floor(std::log10(largest)) - std::floor(std::log10(step) + 1e-9)) + 1);
}

}  // namespace

Scale Scale::Of(ScaleKind kind, double low, double high, int num_ticks) {
  if (!(low <= high)) low = 0, high = 1;
  Scale scale;
  scale.logarithmic_ = (kind == ScaleKind::kLog || kind == ScaleKind::kBytes) && low > 0;
  if (!scale.logarithmic_) {
    scale.MakeLinear(low, high, num_ticks, kind == ScaleKind::kWhole);
  } else if (kind == ScaleKind::kLog) {
    scale.MakeLog(low, high, num_ticks);
  } else {
    scale.MakeBytes(low, high, num_ticks);
  }
  return scale;
}

Scale Scale::OfCategories(absl::Span<const std::string> names) {
  Scale scale;
  for (const std::string& name : names) {
    scale.ticks_.push_back({static_cast<double>(scale.ticks_.size()), name});
  }
  scale.low_ = -0.5;
  scale.high_ = static_cast<double>(names.size()) - 0.5;
  return scale;
}

void Scale::MakeLinear(double low, double high, int num_ticks, bool whole) {
  if (high - low <= 1e-12 * std::abs(high)) {
    const double around = low == 0 ? 1 : std::abs(low) / 2;
    high += around;
    // Times, shares and counts have no values below zero to make room for.
    low = low >= 0 ? std::max(0.0, low - around) : low - around;
  }
  double step = NiceStep((high - low) / num_ticks);
  if (whole) step = std::max(1.0, step);
  // Within a millionth of a tick is on it.
  const double first = std::floor(low / step + 1e-6);
  const double last = std::max(first + 1, std::ceil(high / step - 1e-6));
  low_ = first * step;
  high_ = last * step;
  const int digits = DigitsFor(step, std::max(std::abs(low_), std::abs(high_)));
  for (double i = first; i <= last; ++i) ticks_.push_back({i * step, NumberText(i * step, digits)});
}

void Scale::MakeLog(double low, double high, int num_ticks) {
  const bool fine = high / low < 100;
  const int per_decade = fine ? 3 : 1;
  const auto value = [&](int i) {
    const int decade = static_cast<int>(std::floor(static_cast<double>(i) / per_decade));
    const double factors[] = {1, 2, 5};
    return factors[i - decade * per_decade] * std::pow(10, decade);
  };
  int first = static_cast<int>(std::floor(std::log10(low))) * per_decade;
  while (value(first + 1) <= low * (1 + 1e-9)) ++first;
  int last = first + 1;
  while (value(last) < high * (1 - 1e-9)) ++last;
  low_ = value(first);
  high_ = value(last);
  const int every = std::max(1, (last - first + num_ticks - 1) / num_ticks);
  for (int i = first; i <= last; i += every) ticks_.push_back({value(i), NumberText(value(i))});
}

void Scale::MakeBytes(double low, double high, int num_ticks) {
  int first = static_cast<int>(std::floor(std::log2(low) + 1e-9));
  int last = std::max(first + 1, static_cast<int>(std::ceil(std::log2(high) - 1e-9)));
  const int every = std::max(1, (last - first + num_ticks - 1) / num_ticks);
  low_ = std::exp2(first);
  high_ = std::exp2(last);
  for (int i = first; i <= last; i += every) {
    ticks_.push_back({std::exp2(i), BytesText(std::exp2(i))});
  }
}

double Scale::Place(double value) const {
  if (!logarithmic_) return (value - low_) / (high_ - low_);
  return std::log(value / low_) / std::log(high_ / low_);
}

size_t LabelStride(const Scale& scale, double length) {
  constexpr double kGap = 12;  // numbers side by side are to be read as two
  const std::vector<Tick>& ticks = scale.ticks();
  for (size_t stride = 1; stride < ticks.size(); ++stride) {
    bool fits = true;
    for (size_t i = stride; i < ticks.size(); i += stride) {
      const Tick& left = ticks[i - stride];
      const double apart = (scale.Place(ticks[i].value) - scale.Place(left.value)) * length;
      fits &= apart >= (TextWidth(left.label) + TextWidth(ticks[i].label)) / 2 + kGap;
    }
    if (fits) return stride;
  }
  return std::max<size_t>(1, ticks.size());
}

namespace {

constexpr double kTickLength = 4;
constexpr double kTextGap = 5;
constexpr double kLineHeight = 18;

// A drawing of its own: a legend's key beside its name.
std::string Swatch(const LegendEntry& entry) {
  const std::string series = SeriesClass(entry.series);
  std::string body;
  switch (entry.key) {
    case LegendKey::kPoint:
      body = absl::StrCat("<path class=\"point ", series, "\" d=\"",
                          ShapePath(entry.series, {11, 7}, 4.5), "\"/>");
      break;
    case LegendKey::kLine:
      body = absl::StrCat("<path class=\"line ", series, "\" d=\"M0 7L22 7\"/><path class=\"point ",
                          series, "\" d=\"", ShapePath(entry.series, {11, 7}, 4), "\"/>");
      break;
    case LegendKey::kCurve:
      body = absl::StrCat("<path class=\"line ", CurveClass(entry.series), "\" d=\"M0 7L22 7\"/>");
      break;
    case LegendKey::kLimit:
      body = absl::StrCat("<path class=\"line dashes ", series, "\" d=\"M0 7L22 7\"/>");
      break;
    case LegendKey::kBlock:
      body = absl::StrCat("<rect class=\"block ", series,
                          "\" x=\"4\" y=\"0\" width=\"14\" height=\"14\"/>");
      break;
  }
  return absl::StrCat("<svg class=\"key\" viewBox=\"0 0 22 14\" aria-hidden=\"true\">", body,
                      "</svg>");
}

}  // namespace

std::string SeriesClass(int index) {
  return absl::StrCat("s", index % kNumInks);
}

std::string CurveClass(int index) {
  constexpr int kNumDashes = 4;
  const int dash = index % kNumDashes;
  return dash == 0 ? SeriesClass(index) : absl::StrCat(SeriesClass(index), " dash", dash);
}

void ChartText::LeaveOut(size_t count, size_t of, absl::string_view things, absl::string_view why) {
  if (count == 0) return;
  absl::StrAppend(&note, note.empty() ? "" : " ", "Not drawn: ", count, " of ", of, " ", things,
                  " (", why, ").");
}

std::string Figure(const ChartText& text, const Svg& drawing,
                   absl::Span<const LegendEntry> legend) {
  std::string html = absl::StrCat("<figure class=\"chart\" id=\"", text.id, "\">\n<figcaption><h3>",
                                  Escape(text.title), "</h3>");
  if (!text.note.empty()) absl::StrAppend(&html, "<p>", Escape(text.note), "</p>");
  absl::StrAppend(&html, "</figcaption>\n", drawing.Element());
  if (!legend.empty()) {
    absl::StrAppend(&html, "<ul class=\"legend\">");
    for (const LegendEntry& entry : legend) {
      absl::StrAppend(&html, "<li>", Swatch(entry), Escape(entry.name), "</li>");
    }
    absl::StrAppend(&html, "</ul>\n");
  }
  return html + "</figure>\n";
}

Frame::Frame(const Scale& x, const Scale& y, double top, double height)
    : x_(x), y_(y), top_(top + kLineHeight + 6), bottom_(top + height - 2 * kLineHeight - 6) {
  double widest = 0;
  for (const Tick& tick : y.ticks()) widest = std::max(widest, TextWidth(tick.label));
  // The first and the last label are centred below their ticks.
  left_ = std::max(widest + kTickLength + kTextGap, TextWidth(x.ticks().front().label) / 2);
  right_ = kDrawingWidth - std::max(6.0, TextWidth(x.ticks().back().label) / 2);
}

Place Frame::At(double x, double y) const {
  return {left_ + x_.Place(x) * (right_ - left_), bottom_ - y_.Place(y) * (bottom_ - top_)};
}

void Frame::Draw(Svg& svg, absl::string_view x_label, absl::string_view y_label) const {
  double free_to = bottom_ + kLineHeight;
  for (const Tick& tick : y_.ticks()) {
    const double at = At(x_.low(), tick.value).y;
    svg.Line("grid", {left_, at}, {right_, at});
    if (at + kFontSize > free_to) continue;
    free_to = at;
    svg.Text("tick", {left_ - kTickLength - 2, at + kFontSize * 0.35}, Anchor::kEnd, tick.label);
  }
  svg.Line("axis", {left_, bottom_}, {right_, bottom_});
  const size_t stride = LabelStride(x_, right_ - left_);
  for (size_t i = 0; i < x_.ticks().size(); ++i) {
    const Tick& tick = x_.ticks()[i];
    const double at = At(tick.value, y_.low()).x;
    svg.Line("axis", {at, bottom_}, {at, bottom_ + kTickLength});
    if (i % stride != 0) continue;
    svg.Text("tick", {at, bottom_ + kLineHeight}, Anchor::kMiddle, tick.label);
  }
  // Level, above its axis: no head has to be turned, and no width is lost.
  svg.Text("label", {0, top_ - kTextGap - 5}, Anchor::kStart, y_label);
  svg.Text("label", {(left_ + right_) / 2, bottom_ + 2 * kLineHeight + 2}, Anchor::kMiddle,
           x_label);
}

}  // namespace moe::report
