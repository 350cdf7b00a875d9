#include "moe/cli/verify/axes.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>

#include "comm/world_plan.h"
#include "moe/cli/base/offload_text.h"
#include "moe/cli/base/settings.h"

namespace moe::verify {
namespace {

// More threads or processes than this on one machine tell nothing new.
constexpr int kMostRanks = 64;

// An axis of whole numbers, "overlap 4".
Axis NumberAxis(const char* name, std::vector<std::string> values, int most, int Layout::*field) {
  return {.name = name,
          .values = std::move(values),
          .apply =
              [=](const std::string& value, Layout& layout) {
                int& number = layout.*field;
                const bool fits = absl::SimpleAtoi(value, &number) && number >= 1 && number <= most;
                if (fits) return absl::OkStatus();
                return absl::InvalidArgumentError(absl::StrCat("a whole number from 1 to ", most));
              },
          .text = [=](const Layout& layout) { return absl::StrCat(name, " ", layout.*field); },
          .cell =
              [=](const Layout& layout) {
                return measure::Cell(int64_t{layout.*field});
              }};
}

template <typename Value, size_t N>
Axis WordAxis(const char* name, std::vector<std::string> values, const Choice<Value> (&choices)[N],
              Value Layout::*field) {
  const auto word = [&choices, field](const Layout& l) {
    return NameOf(l.*field, choices);
  };
  return {.name = name,
          .values = std::move(values),
          .words = cli::WordsOf(choices),
          .apply =
              [&choices, field](const std::string& value, Layout& layout) {
                const std::optional<Value> known = ValueOf(value, choices);
                if (!known.has_value()) {
                  return absl::InvalidArgumentError(
                      absl::StrCat("one of ", absl::StrJoin(cli::WordsOf(choices), ", ")));
                }
                layout.*field = *known;
                return absl::OkStatus();
              },
          .text = word,
          .cell = word};
}

absl::Status SetCapacity(const std::string& value, Layout& layout) {
  double number = 0;
  if (value == "none") {
    layout.capacity = std::nullopt;
  } else if (absl::SimpleAtod(value, &number) && std::isfinite(number) && number > 0) {
    layout.capacity = number;
  } else {
    return absl::InvalidArgumentError("none or a number above 0");
  }
  return absl::OkStatus();
}

absl::Status SetOffload(const std::string& value, Layout& layout) {
  layout.offload = value;
  return cli::ParseOffload(value).status();
}

// `axis`, of a model: shown with its name, where it is not as in Layout().
Axis OfModel(Axis axis, std::vector<std::string> all) {
  axis.all = std::move(all);
  axis.of_model = true;
  const std::string before = axis.words.empty() ? "" : absl::StrCat(axis.name, " ");
  axis.text = [text = axis.text, before](const Layout& layout) {
    const std::string value = text(layout);
    return value == text(Layout()) ? "" : before + value;
  };
  return axis;
}

std::vector<Axis> AxesOfModels() {
  Axis etp = OfModel(NumberAxis("etp", {"1"}, 8, &Layout::expert_tensor), {"1", "2"});
  etp.valid = [](const Layout& l) {
    return l.ranks % (l.expert_parallel * l.expert_tensor) == 0;
  };
  Axis tp = OfModel(NumberAxis("tp", {"1"}, 8, &Layout::tensor), {"1", "2", "3", "4"});
  tp.valid = [](const Layout& l) {
    return l.expert_parallel * l.expert_tensor % l.tensor == 0;
  };
  Axis pp = OfModel(NumberAxis("pp", {"1"}, kMostRanks, &Layout::pipeline), {"1", "2", "4"});
  pp.valid = [](const Layout& l) {
    const int block = l.expert_parallel * l.expert_tensor;
    return l.ranks % l.pipeline == 0 && l.ranks / l.pipeline % block == 0;
  };
  Axis vp = OfModel(NumberAxis("vp", {"1"}, kMostRanks, &Layout::chunks), {"1", "2"});
  vp.valid = [](const Layout& l) {
    return l.pipeline > 1 || l.chunks == 1;
  };
  Axis schedule = OfModel(WordAxis("schedule", {"1f1b"}, kScheduleWords, &Layout::schedule),
                          cli::WordsOf(kScheduleWords));
  // 1F1B over several chunks is interleaved (PipelineOf).
  schedule.valid = [](const Layout& l) {
    if (l.schedule == ScheduleKind::k1F1B) return true;
    if (l.schedule == ScheduleKind::k1F1BOverlap) return l.dispatch != DispatchAlgorithm::kDirect;
    return l.pipeline > 1 && (l.chunks > 1) == (l.schedule == ScheduleKind::kInterleaved);
  };
  Axis zero = OfModel(WordAxis("zero", {"0"}, kZeroWords, &Layout::zero), cli::WordsOf(kZeroWords));
  zero.cell = [](const Layout& l) {
    return measure::Cell(static_cast<int64_t>(l.zero));
  };
  const auto offload_text = [](const Layout& l) {
    return l.offload;
  };
  const Axis offload = {.name = "offload",
                        .values = {"none"},
                        .words = {"none", "optimizer", "optimizer:file=DIR"},
                        .apply = SetOffload,
                        .text = offload_text,
                        .cell = offload_text};
  return {etp,
          tp,
          pp,
          vp,
          schedule,
          zero,
          OfModel(offload, {}),  // the word "all" would not name a folder
          OfModel(WordAxis("recompute", {"none"}, kRecomputeWords, &Layout::recompute),
                  cli::WordsOf(kRecomputeWords))};
}

std::vector<std::string> NumbersTo(int most) {
  std::vector<std::string> numbers;
  for (int n = 1; n <= most; ++n) numbers.push_back(absl::StrCat(n));
  return numbers;
}

// A layout, and by axis the index of its value: the first of equal ones.
struct Point {
  Layout layout;
  std::vector<size_t> at;
};

// Adds all points whose first axes are as `from` has them.
void AddPoints(absl::Span<const Axis> axes, const Point& from, std::vector<Point>& points) {
  if (from.at.size() == axes.size()) {
    points.push_back(from);
    return;
  }
  const Axis& axis = axes[from.at.size()];
  std::vector<Layout> layouts;
  for (const std::string& value : axis.values) {
    Point next = from;
    axis.apply(value, next.layout).IgnoreError();
    layouts.push_back(next.layout);
    if (axis.valid != nullptr && !axis.valid(next.layout)) continue;
    next.at.push_back(std::find(layouts.begin(), layouts.end(), next.layout) - layouts.begin());
    AddPoints(axes, next, points);
  }
}

std::vector<Point> PointsOf(absl::Span<const Axis> axes) {
  std::vector<Point> points;
  AddPoints(axes, {}, points);
  return points;
}

// For each two axes, with their values, a number below `values` squared. `first`: by axis the
// number of its first value.
std::vector<size_t> PairsOf(const Point& point, const std::vector<size_t>& first, size_t values) {
  std::vector<size_t> pairs;
  for (size_t a = 0; a < point.at.size(); ++a) {
    for (size_t b = a + 1; b < point.at.size(); ++b) {
      pairs.push_back((first[a] + point.at[a]) * values + first[b] + point.at[b]);
    }
  }
  return pairs;
}

}  // namespace

int Layout::node_size() const {
  for (int size = expert_parallel / 2; size > 1; --size) {
    if (expert_parallel % size == 0) return size;
  }
  return 1;
}

std::string Describe(const Layout& layout) {
  std::vector<std::string> texts;
  for (const Axis& axis : Axes()) {
    if (std::string text = axis.text(layout); !text.empty()) texts.push_back(std::move(text));
  }
  return absl::StrJoin(texts, " ");
}

std::string CapacityText(const std::optional<double>& capacity) {
  return capacity.has_value() ? absl::StrCat(*capacity) : "none";
}

const std::vector<Axis>& Axes() {
  static const std::vector<Axis> axes = [] {
    Axis ranks = NumberAxis("ranks", {"1", "2", "3", "4", "8"}, kMostRanks, &Layout::ranks);
    ranks.text = [](const Layout& l) {
      return absl::StrCat(l.ranks, l.ranks == 1 ? " rank" : " ranks");
    };
    Axis ep = NumberAxis("ep", NumbersTo(kMostRanks), kMostRanks, &Layout::expert_parallel);
    ep.all = ep.values;
    ep.valid = [](const Layout& l) {
      return l.ranks % l.expert_parallel == 0;
    };
    const Axis capacity = {
        .name = "capacity",
        .values = {"none", "1"},
        .apply = SetCapacity,
        .text = [](const Layout& l) { return absl::StrCat("cf ", CapacityText(l.capacity)); },
        .cell =
            [](const Layout& l) {
              return l.capacity.has_value() ? measure::Cell(*l.capacity) : measure::Cell();
            }};
    std::vector<Axis> all = {ranks,
                             ep,
                             WordAxis("transport", {"local"}, kBackendWords, &Layout::transport),
                             WordAxis("dispatch", {"staged", "direct", "hierarchical"},
                                      kDispatchWords, &Layout::dispatch),
                             NumberAxis("overlap", {"1", "4"}, 1024, &Layout::overlap),
                             capacity};
    for (Axis& axis : AxesOfModels()) all.push_back(std::move(axis));
    return all;
  }();
  return axes;
}

Axis& Find(std::vector<Axis>& axes, absl::string_view name) {
  return *std::find_if(axes.begin(), axes.end(), [&](const Axis& a) { return a.name == name; });
}

std::vector<Layout> AllLayouts(absl::Span<const Axis> axes) {
  std::vector<Layout> all;
  for (const Point& point : PointsOf(axes)) all.push_back(point.layout);
  return all;
}

std::vector<Layout> PairwiseLayouts(absl::Span<const Axis> axes) {
  const std::vector<Point> all = PointsOf(axes);
  std::vector<size_t> first;
  size_t values = 0;
  for (const Axis& axis : axes) {
    first.push_back(values);
    values += axis.values.size();
  }
  std::vector<std::vector<size_t>> pairs;  // by point
  std::vector<uint8_t> open(values * values);
  for (const Point& point : all) {
    pairs.push_back(PairsOf(point, first, values));
    for (const size_t pair : pairs.back()) open[pair] = 1;
  }
  std::vector<Layout> chosen;
  while (true) {
    size_t best = 0, most = 0;
    for (size_t p = 0; p < all.size(); ++p) {
      size_t fresh = 0;
      for (const size_t pair : pairs[p]) fresh += open[pair];
      if (fresh > most) {
        most = fresh;
        best = p;
      }
    }
    if (most == 0) return chosen;
    for (const size_t pair : pairs[best]) open[pair] = 0;
    chosen.push_back(all[best].layout);
  }
}

}  // namespace moe::verify
