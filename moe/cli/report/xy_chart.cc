#include <algorithm>
#include <limits>

#include <absl/strings/str_cat.h>

#include "moe/cli/report/charts.h"

namespace moe::report {
namespace {

constexpr double kHeight = 290;
constexpr double kRadius = 4.5;
constexpr double kRing = kRadius + 3.5;

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void Take(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
};

bool IsLog(ScaleKind kind) {
  return kind == ScaleKind::kLog || kind == ScaleKind::kBytes;
}

bool Drawable(const XyChart& chart, const XyPoint& p) {
  return std::isfinite(p.x) && std::isfinite(p.y) && (!IsLog(chart.x_kind) || p.x > 0) &&
         (!IsLog(chart.y_kind) || p.y > 0);
}

// Series with the points that can be drawn, curves thinned.
std::vector<XySeries> Drawn(const XyChart& chart) {
  std::vector<XySeries> drawn;
  for (XySeries series : chart.series) {
    auto& points = series.points;
    points.erase(std::remove_if(points.begin(), points.end(),
                                [&](const XyPoint& p) { return !Drawable(chart, p); }),
                 points.end());
    if (series.style == XyStyle::kLine) points = Thinned(points);
    if (!points.empty()) drawn.push_back(std::move(series));
  }
  return drawn;
}

// Where texts and points already are.
class Occupied {
 public:
  struct Box {
    double left, top, right, bottom;
  };
  bool Free(const Box& b) const {
    return std::none_of(boxes_.begin(), boxes_.end(), [&](const Box& o) {
      return b.left < o.right && o.left < b.right && b.top < o.bottom && o.top < b.bottom;
    });
  }
  void Add(const Box& box) { boxes_.push_back(box); }

 private:
  std::vector<Box> boxes_;
};

class XyDrawing {
 public:
  explicit XyDrawing(const XyChart& chart)
      : chart_(chart),
        text_(TextWithWhatIsLeftOut(chart)),
        series_(Drawn(chart)),
        x_(chart.x_categories.empty()
               ? MakeScale(chart.x_kind, false, &XyPoint::x, &XyPoint::x_error)
               : Scale::OfCategories(chart.x_categories)),
        y_(MakeScale(chart.y_kind, chart.y_from_zero, &XyPoint::y, &XyPoint::y_error)),
        frame_(x_, y_, 0, kHeight),
        svg_(kDrawingWidth, kHeight, chart.text.title) {}

  std::string Run() {
    if (series_.empty()) return "";
    frame_.Draw(svg_, chart_.x_label, chart_.y_label);
    for (const XySeries& s : series_) DrawLine(s);
    if (chart_.front.has_value()) DrawFront();
    for (const XySeries& s : series_) DrawPoints(s);
    DrawLabels();
    return Figure(text_, svg_, Legend());
  }

 private:
  static ChartText TextWithWhatIsLeftOut(const XyChart& chart) {
    size_t points = 0, drawn_points = 0, drawn_series = 0;
    for (const XySeries& s : chart.series) {
      const auto drawn = static_cast<size_t>(std::count_if(
          s.points.begin(), s.points.end(), [&](const XyPoint& p) { return Drawable(chart, p); }));
      if (drawn == 0) continue;
      ++drawn_series;
      drawn_points += drawn;
      points += s.points.size();
    }
    ChartText text = chart.text;
    constexpr char kWhy[] = "no such figure";
    text.LeaveOut(chart.series.size() - drawn_series, chart.series.size(), "series", kWhy);
    text.LeaveOut(points - drawn_points, points, "points", kWhy);
    return text;
  }
  Scale MakeScale(ScaleKind kind, bool from_zero, double XyPoint::*value,
                  double XyPoint::*error) const {
    Range range;
    if (from_zero) range.Take(0);
    for (const XySeries& s : series_) {
      for (const XyPoint& p : s.points) {
        range.Take(p.*value);
        // A whisker to zero or below has no end on a logarithmic axis.
        if (!IsLog(kind) || p.*value > p.*error) range.Take(p.*value - p.*error);
        range.Take(p.*value + p.*error);
      }
    }
    return Scale::Of(kind, range.low, range.high, 5);
  }

  void DrawLine(const XySeries& s) {
    if (s.style == XyStyle::kPoints) return;
    std::vector<Place> places;
    for (const XyPoint& p : s.points) places.push_back(frame_.At(p.x, p.y));
    // One value alone is still to be seen: a limit crosses the frame, a curve is a dot.
    if (places.size() == 1) {
      const double reach = s.style == XyStyle::kLimit ? frame_.right() - frame_.left() : 2;
      const double y = places[0].y;
      const double from = std::max(frame_.left(), places[0].x - reach);
      places = {{from, y}, {std::min(frame_.right(), places[0].x + reach), y}};
    }
    std::string classes = absl::StrCat("line ", SeriesClass(s.look));
    if (s.style == XyStyle::kLimit) classes += " dashes";
    if (s.style == XyStyle::kLine) classes = absl::StrCat("line ", CurveClass(s.look));
    if (s.style == XyStyle::kLinePoints) {
      svg_.Path(classes, LinePath(places));
    } else {
      svg_.PathMark(classes, LinePath(places), s.name);
    }
  }

  // Lower left and upper right. Kept inside the frame, also where a logarithmic axis has no place
  // for them.
  std::pair<Place, Place> WhiskerEnds(const XyPoint& p) const {
    return {frame_.At(std::max(x_.low(), p.x - p.x_error), std::max(y_.low(), p.y - p.y_error)),
            frame_.At(p.x + p.x_error, p.y + p.y_error)};
  }

  void DrawWhiskers(const XyPoint& p, const std::string& classes) {
    const Place at = frame_.At(p.x, p.y);
    const auto [low, high] = WhiskerEnds(p);
    if (p.y_error > 0) svg_.Line(classes, {at.x, low.y}, {at.x, high.y});
    if (p.x_error > 0) svg_.Line(classes, {low.x, at.y}, {high.x, at.y});
  }

  void DrawPoints(const XySeries& s) {
    if (s.style == XyStyle::kLine || s.style == XyStyle::kLimit) return;
    for (const XyPoint& p : s.points) {
      DrawWhiskers(p, absl::StrCat("whisker ", SeriesClass(s.look)));
      const Place at = frame_.At(p.x, p.y);
      svg_.PathMark(absl::StrCat("point ", SeriesClass(s.look)), ShapePath(s.look, at, kRadius),
                    p.tooltip.empty() ? s.name : p.tooltip);
    }
  }

  void DrawFront() {
    std::vector<const XyPoint*> points;
    std::vector<std::pair<bench::Sample, bench::Sample>> samples;
    for (const XySeries& s : series_) {
      if (s.style != XyStyle::kPoints) continue;
      for (const XyPoint& p : s.points) {
        points.push_back(&p);
        samples.emplace_back(bench::SampleOf(p.x, p.x_error), bench::SampleOf(p.y, p.y_error));
      }
    }
    for (const int i : ParetoFront(samples, chart_.front->x, chart_.front->y)) {
      front_.push_back(points[i]);
    }
    if (front_.empty()) return;
    for (const XyPoint* p : front_) {
      const Place at = frame_.At(p->x, p->y);
      // What the front attains between two points is the worse of both: a staircase.
      if (!stairs_.empty()) {
        const bool keep_y = chart_.front->x == Better::kLower;
        stairs_.push_back(keep_y ? Place{at.x, stairs_.back().y} : Place{stairs_.back().x, at.y});
      }
      stairs_.push_back(at);
    }
    svg_.PathMark("front", LinePath(stairs_), "Pareto front");
    for (const XyPoint* p : front_) {
      svg_.PathMark("ring", ShapePath(0, frame_.At(p->x, p->y), kRing), "on the Pareto front");
    }
  }

  void DrawLabels() {
    Occupied occupied;
    for (const XySeries& s : series_) {
      for (const XyPoint& p : s.points) {
        const Place at = frame_.At(p.x, p.y);
        occupied.Add({at.x - kRing, at.y - kRing, at.x + kRing, at.y + kRing});
        const auto [low, high] = WhiskerEnds(p);
        occupied.Add({low.x - 1, high.y - 1, high.x + 1, low.y + 1});
      }
    }
    for (size_t i = 0; i + 1 < stairs_.size(); ++i) {
      const auto [x0, x1] = std::minmax(stairs_[i].x, stairs_[i + 1].x);
      const auto [y0, y1] = std::minmax(stairs_[i].y, stairs_[i + 1].y);
      occupied.Add({x0 - 1, y0 - 1, x1 + 1, y1 + 1});
    }
    // Those of the front come first. Where there are many, theirs are all: a few names among points
    // that have none would be taken for those of their neighbours.
    for (const XyPoint* p : front_) DrawLabel(*p, occupied);
    size_t points = 0;
    for (const XySeries& s : series_) points += s.points.size();
    if (chart_.front.has_value() && points > kMaxSeries) return;
    for (const XySeries& s : series_) {
      for (const XyPoint& p : s.points) {
        if (std::find(front_.begin(), front_.end(), &p) == front_.end()) DrawLabel(p, occupied);
      }
    }
  }

  // To the right, left, above or below the point, whichever is free; else nowhere.
  void DrawLabel(const XyPoint& p, Occupied& occupied) {
    if (p.label.empty()) return;
    constexpr double kGap = kRing + 2;
    const Place at = frame_.At(p.x, p.y);
    const double width = TextWidth(p.label);
    const Place starts[] = {{at.x + kGap, at.y + 4},
                            {at.x - kGap - width, at.y + 4},
                            {at.x - width / 2, at.y - kGap},
                            {at.x - width / 2, at.y + kGap + 10}};
    for (const Place& start : starts) {
      const Occupied::Box box = {start.x, start.y - 11, start.x + width, start.y + 3};
      const bool inside = box.left >= frame_.left() && box.right <= kDrawingWidth &&
                          box.top >= frame_.top() - 4 && box.bottom <= frame_.bottom();
      if (!inside || !occupied.Free(box)) continue;
      occupied.Add(box);
      svg_.Text("beside", start, Anchor::kStart, p.label);
      return;
    }
  }

  std::vector<LegendEntry> Legend() const {
    std::vector<LegendEntry> legend;
    if (series_.size() < 2) return legend;  // the heading says it
    for (const XySeries& s : series_) {
      LegendKey key = LegendKey::kPoint;
      if (s.style == XyStyle::kLimit) key = LegendKey::kLimit;
      if (s.style == XyStyle::kLinePoints) key = LegendKey::kLine;
      if (s.style == XyStyle::kLine) key = LegendKey::kCurve;
      legend.push_back({.series = s.look, .key = key, .name = s.name});
    }
    return legend;
  }

  const XyChart& chart_;
  const ChartText text_;
  const std::vector<XySeries> series_;
  const Scale x_, y_;
  const Frame frame_;
  Svg svg_;
  std::vector<const XyPoint*> front_;
  std::vector<Place> stairs_;
};

}  // namespace

std::vector<XyPoint> Thinned(const std::vector<XyPoint>& points) {
  const size_t n = points.size();
  if (n <= kMaxCurvePoints) return points;
  constexpr size_t kStretches = kMaxCurvePoints / 2;
  std::vector<XyPoint> thinned;
  for (size_t s = 0; s < kStretches; ++s) {
    const auto begin = points.begin() + static_cast<int64_t>(n * s / kStretches);
    const auto end = points.begin() + static_cast<int64_t>(n * (s + 1) / kStretches);
    auto [low, high] = std::minmax_element(
        begin, end, [](const XyPoint& a, const XyPoint& b) { return a.y < b.y; });
    if (low > high) std::swap(low, high);
    thinned.push_back(*low);
    if (high != low) thinned.push_back(*high);
  }
  return thinned;
}

std::string Render(const XyChart& chart) {
  return XyDrawing(chart).Run();
}

}  // namespace moe::report
