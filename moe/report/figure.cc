#include "moe/report/figure.h"

#include <algorithm>

#include <absl/strings/str_cat.h>

#include "moe/report/format.h"
#include "moe/report/palette.h"

namespace moe::report {
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
  left_ = widest + kTickLength + kTextGap;
  // The last label is centred below its tick.
  right_ = kDrawingWidth - std::max(6.0, TextWidth(x.ticks().back().label) / 2);
}

Place Frame::At(double x, double y) const {
  return {left_ + x_.Place(x) * (right_ - left_), bottom_ - y_.Place(y) * (bottom_ - top_)};
}

void Frame::Draw(Svg& svg, absl::string_view x_label, absl::string_view y_label) const {
  DrawY(svg);
  DrawX(svg);
  // Level, above its axis: no head has to be turned, and no width is lost.
  svg.Text("label", {0, top_ - kTextGap - 5}, Anchor::kStart, y_label);
  svg.Text("label", {(left_ + right_) / 2, bottom_ + 2 * kLineHeight + 2}, Anchor::kMiddle,
           x_label);
}

void Frame::DrawX(Svg& svg) const {
  svg.Line("axis", {left_, bottom_}, {right_, bottom_});
  double free_from = 0;
  for (const Tick& tick : x_.ticks()) {
    const double at = left_ + x_.Place(tick.value) * (right_ - left_);
    svg.Line("axis", {at, bottom_}, {at, bottom_ + kTickLength});
    const double half = TextWidth(tick.label) / 2;
    if (at - half < free_from) continue;
    free_from = at + half + kTextGap;
    svg.Text("tick", {at, bottom_ + kLineHeight}, Anchor::kMiddle, tick.label);
  }
}

void Frame::DrawY(Svg& svg) const {
  double free_to = bottom_ + kLineHeight;
  for (const Tick& tick : y_.ticks()) {
    const double at = bottom_ - y_.Place(tick.value) * (bottom_ - top_);
    svg.Line("grid", {left_, at}, {right_, at});
    if (at + kFontSize > free_to) continue;
    free_to = at;
    svg.Text("tick", {left_ - kTickLength - 2, at + kFontSize * 0.35}, Anchor::kEnd, tick.label);
  }
}

}  // namespace moe::report
