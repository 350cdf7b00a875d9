// --layouts.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/str_split.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/base/choices.h"
#include "moe/cli/base/settings.h"
#include "moe/cli/verify/verify_options.h"

namespace moe::cli {
namespace {

using Texts = std::vector<std::string>;

// More threads or processes than this on one machine measure nothing.
constexpr int kMostRanks = 64;

absl::Status Wrong(const std::string& axis, const std::string& value, const std::string& expected) {
  return absl::InvalidArgumentError(
      absl::StrCat("--layouts: ", axis, " is '", value, "', expected ", expected));
}

absl::StatusOr<std::vector<int>> Integers(const std::string& axis, const Texts& texts, int most) {
  std::vector<int> values;
  for (const std::string& text : texts) {
    int value = 0;
    if (!absl::SimpleAtoi(text, &value) || value < 1 || value > most) {
      return Wrong(axis, text, absl::StrCat("a whole number from 1 to ", most));
    }
    values.push_back(value);
  }
  return values;
}

// The values that `texts` name.
template <typename Value, size_t N>
absl::StatusOr<std::vector<Value>> Named(const std::string& axis, const Texts& texts,
                                         const Choice<Value> (&choices)[N]) {
  const Texts names = WordsOf(choices);
  std::vector<Value> values;
  for (const std::string& text : texts) {
    if (std::count(names.begin(), names.end(), text) == 0) {
      return Wrong(
          axis, text,
          absl::StrCat("one of ", absl::StrJoin(names, ", "), DidYouMean(text, names, "", "")));
    }
    values.push_back(ValueOf(text, choices));
  }
  return values;
}

absl::Status SetCapacity(const Texts& texts, verify::LayoutAxes& axes) {
  axes.capacity.clear();
  for (const std::string& text : texts) {
    double value = 0;
    if (text == "none") {
      axes.capacity.push_back(std::nullopt);
    } else if (absl::SimpleAtod(text, &value) && std::isfinite(value) && value > 0) {
      axes.capacity.push_back(value);
    } else {
      return Wrong("capacity", text, "none or a number above 0");
    }
  }
  return absl::OkStatus();
}

absl::Status SetAxis(const std::string& name, const Texts& values, LayoutRequest& request) {
  verify::LayoutAxes& axes = request.axes;
  if (name == "ranks") {
    MOE_ASSIGN_OR_RETURN(axes.ranks, Integers(name, values, kMostRanks));
  } else if (name == "ep") {
    axes.expert_parallel.clear();
    if (values == Texts{"all"}) return absl::OkStatus();
    MOE_ASSIGN_OR_RETURN(axes.expert_parallel, Integers(name, values, kMostRanks));
  } else if (name == "transport") {
    MOE_ASSIGN_OR_RETURN(axes.transport, Named(name, values, kBackends));
    request.names_transport = true;
    request.names_mpi = std::count(values.begin(), values.end(), "mpi") != 0;
  } else if (name == "dispatch") {
    request.names_dispatch = true;
    MOE_ASSIGN_OR_RETURN(axes.dispatch, Named(name, values, kDispatches));
  } else if (name == "overlap") {
    MOE_ASSIGN_OR_RETURN(axes.overlap, Integers(name, values, 1024));
  } else if (name == "capacity") {
    request.names_capacity = true;
    return SetCapacity(values, axes);
  } else {
    const Texts names = {"ranks", "ep", "transport", "dispatch", "overlap", "capacity"};
    return absl::InvalidArgumentError(absl::StrCat("--layouts: unknown axis '", name,
                                                   "', expected ", absl::StrJoin(names, ", "),
                                                   DidYouMean(name, names, "", "")));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<LayoutRequest> ParseLayouts(const std::string& text) {
  LayoutRequest request;
  Texts seen;
  for (const absl::string_view word : absl::StrSplit(text, ' ', absl::SkipWhitespace())) {
    const std::pair<std::string, std::string> parts = absl::StrSplit(word, absl::MaxSplits('=', 1));
    if (parts.second.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "--layouts: '", word, "' has no values, expected axis=value,value such as ranks=1,2"));
    }
    if (std::count(seen.begin(), seen.end(), parts.first) != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--layouts: ", parts.first, " is given twice, expected once"));
    }
    seen.push_back(parts.first);
    MOE_RETURN_IF_ERROR(SetAxis(parts.first, absl::StrSplit(parts.second, ','), request));
  }
  if (verify::AllLayouts(request.axes).empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("--layouts: no ep of ", absl::StrJoin(request.axes.expert_parallel, ","),
                     " divides any of ranks ", absl::StrJoin(request.axes.ranks, ","),
                     ", expected ep=all or a divisor"));
  }
  return request;
}

}  // namespace moe::cli
