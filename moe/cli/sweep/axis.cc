#include "moe/cli/sweep/axis.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <set>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_format.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/measure/tables.h"

namespace moe::sweep {

namespace {

absl::Status Wrong(absl::string_view item, absl::string_view expected) {
  return absl::InvalidArgumentError(absl::StrCat("'", item, "', expected ", expected));
}

std::string FormText(const AxisForm& form) {
  if (form.kind == AxisKind::kText) return "some text";
  const std::string words = absl::StrJoin(form.words, ", ");
  return absl::StrCat(form.kind == AxisKind::kInteger ? "a whole number " : "a number ",
                      form.above ? "above " : "from ", form.least,
                      words.empty() ? "" : absl::StrCat(" or ", words),
                      ", or a range: first-last, first-last+step or first-last*factor");
}

// The shortest text that reads back as the same number.
std::string NumberText(double value, const AxisForm& form) {
  if (form.kind == AxisKind::kInteger) return absl::StrCat(static_cast<int64_t>(value));
  return measure::Cell(value).text();
}

std::optional<double> Number(absl::string_view text, const AxisForm& form) {
  double value = 0;
  if (form.kind == AxisKind::kInteger) {
    int32_t whole = 0;
    if (!absl::SimpleAtoi(text, &whole)) return std::nullopt;
    value = whole;
  } else if (!absl::SimpleAtod(text, &value) || !std::isfinite(value)) {
    return std::nullopt;
  }
  return value;
}

bool InBounds(double value, const AxisForm& form) {
  return form.above ? value > form.least : value >= form.least;
}

struct Range {
  double first = 0, last = 0;
  char step_kind = '+';
  double step = 1;
};

// A number may contain a '-' itself (1e-3): the range is cut at a '-' with a number on either side.
std::optional<Range> RangeOf(absl::string_view item, const AxisForm& form) {
  for (size_t dash = item.find('-', 1); dash != absl::string_view::npos;
       dash = item.find('-', dash + 1)) {
    const auto first = Number(item.substr(0, dash), form);
    if (!first.has_value()) continue;
    const absl::string_view rest = item.substr(dash + 1);
    if (const auto last = Number(rest, form); last.has_value()) return Range{*first, *last};
    for (size_t at = rest.find_first_of("+*", 1); at != absl::string_view::npos;
         at = rest.find_first_of("+*", at + 1)) {
      const auto last = Number(rest.substr(0, at), form);
      const auto step = Number(rest.substr(at + 1), form);
      if (last.has_value() && step.has_value()) return Range{*first, *last, rest[at], *step};
    }
  }
  return std::nullopt;
}

// Rounded to 12 digits: 1 + 2 * 0.1 is meant to be 1.2.
double Rounded(double value) {
  double rounded = 0;
  return absl::SimpleAtod(absl::StrFormat("%.12g", value), &rounded) ? rounded : value;
}

absl::StatusOr<std::vector<double>> ValuesOf(absl::string_view item, const Range& range,
                                             const AxisForm& form) {
  for (const double end : {range.first, range.last}) {
    if (!InBounds(end, form)) return Wrong(item, FormText(form));
  }
  if (range.last < range.first) return Wrong(item, "a range whose last is not below its first");
  const bool product = range.step_kind == '*';
  if (product && range.step <= 1) return Wrong(item, "a factor above 1");
  if (product && range.first <= 0) return Wrong(item, "a first value above 0 before '*'");
  if (!product && range.step <= 0) return Wrong(item, "a step above 0");
  // Steps are rounded: the last value still counts if it differs by some units in the last place.
  // Whole numbers below 2^31 are exact.
  const double slack = form.kind == AxisKind::kInteger ? 0 : 1e-9;
  const double limit = range.last + slack * std::abs(range.last);
  std::vector<double> values;
  double value = range.first;
  for (int64_t i = 1; value <= limit; ++i) {
    if (static_cast<int64_t>(values.size()) == kMostAxisValues) {
      return Wrong(item, absl::StrCat("at most ", kMostAxisValues, " values"));
    }
    values.push_back(Rounded(std::min(value, range.last)));
    value = product ? value * range.step : range.first + static_cast<double>(i) * range.step;
  }
  return values;
}

// Appends the values of `item`.
absl::Status AddItem(absl::string_view item, const AxisForm& form,
                     std::vector<std::string>& values) {
  const bool word = std::find(form.words.begin(), form.words.end(), item) != form.words.end();
  if (word || (form.kind == AxisKind::kText && !item.empty())) {
    values.emplace_back(item);
    return absl::OkStatus();
  }
  const absl::Status wrong = Wrong(item, FormText(form));
  if (form.kind == AxisKind::kText) return wrong;
  if (const auto number = Number(item, form); number.has_value()) {
    if (!InBounds(*number, form)) return wrong;
    values.push_back(NumberText(*number, form));
    return absl::OkStatus();
  }
  const auto range = RangeOf(item, form);
  if (!range.has_value()) return wrong;
  MOE_ASSIGN_OR_RETURN(const std::vector<double> numbers, ValuesOf(item, *range, form));
  for (const double number : numbers) values.push_back(NumberText(number, form));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseAxis(absl::string_view text, const AxisForm& form) {
  std::vector<std::string> values;
  for (const absl::string_view item : absl::StrSplit(text, ',')) {
    MOE_RETURN_IF_ERROR(AddItem(item, form, values));
    if (static_cast<int64_t>(values.size()) > kMostAxisValues) {
      return Wrong(text, absl::StrCat("at most ", kMostAxisValues, " values"));
    }
  }
  std::set<std::string> seen;
  for (const std::string& value : values) {
    if (!seen.insert(value).second && !form.repeats) {
      return Wrong(text, absl::StrCat("every value once, and ", value, " stands twice"));
    }
  }
  return values;
}

absl::StatusOr<std::vector<std::vector<std::string>>> CrossProduct(absl::Span<const Axis> axes) {
  int64_t count = 1;
  for (const Axis& axis : axes) {
    if (axis.with >= 0) continue;
    count *= static_cast<int64_t>(axis.values.size());
    if (count <= kMostPoints) continue;
    const std::string sizes = absl::StrJoin(axes, " x ", [](std::string* out, const Axis& a) {
      absl::StrAppend(out, a.values.size(), " of --", a.name);
    });
    return absl::InvalidArgumentError(
        absl::StrCat("the sweep has ", sizes, " points, expected at most ", kMostPoints));
  }
  std::vector<std::vector<std::string>> points(count);
  std::vector<int64_t> place(axes.size());  // of a point on each axis
  for (int64_t i = 0; i < count; ++i) {
    int64_t rest = i;
    for (size_t a = axes.size(); a-- > 0;) {
      if (axes[a].with >= 0) continue;
      const auto size = static_cast<int64_t>(axes[a].values.size());
      place[a] = rest % size;
      rest /= size;
    }
    for (const Axis& axis : axes) {
      const size_t a = points[i].size();
      if (axis.with >= 0) place[a] = place[axis.with];
      points[i].push_back(axis.values[place[a]]);
    }
  }
  return points;
}

}  // namespace moe::sweep
