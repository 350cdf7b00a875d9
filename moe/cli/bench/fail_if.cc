#include "moe/cli/bench/fail_if.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"

namespace moe::bench {

// Recursive descent over text_; each function returns the node it made.
class FailIfParser {
 public:
  FailIfParser(absl::string_view text, const std::vector<std::string>& columns, FailIf::Base base)
      : rest_(text), columns_(columns), base_(base) {
    result_.text_ = std::string(text);
  }

  absl::StatusOr<FailIf> Run() {
    MOE_ASSIGN_OR_RETURN(result_.root_, Or(0));
    if (!Rest().empty()) return Expected("&&, || or the end");
    return std::move(result_);
  }

 private:
  using Kind = FailIf::Kind;
  using Compare = FailIf::Compare;

  // Nobody nests deeper by hand, and the stack has an end.
  static constexpr int kMaxDepth = 100;

  absl::string_view Rest() {
    rest_ = absl::StripLeadingAsciiWhitespace(rest_);
    return rest_;
  }
  bool Take(absl::string_view token) {
    Rest();
    return absl::ConsumePrefix(&rest_, token);
  }
  absl::Status Expected(absl::string_view what) {
    const std::string found = Rest().empty() ? "the end" : absl::StrCat("'", Rest(), "'");
    return absl::InvalidArgumentError(
        absl::StrCat("'", result_.text_, "': at ", found, ", expected ", what));
  }
  int Add(FailIf::Node node) {
    result_.nodes_.push_back(std::move(node));
    return static_cast<int>(result_.nodes_.size()) - 1;
  }

  absl::StatusOr<int> Or(int depth) {
    MOE_ASSIGN_OR_RETURN(int left, And(depth));
    while (Take("||")) {
      MOE_ASSIGN_OR_RETURN(const int right, And(depth));
      left = Add({.kind = Kind::kOr, .left = left, .right = right});
    }
    return left;
  }

  absl::StatusOr<int> And(int depth) {
    MOE_ASSIGN_OR_RETURN(int left, Term(depth));
    while (Take("&&")) {
      MOE_ASSIGN_OR_RETURN(const int right, Term(depth));
      left = Add({.kind = Kind::kAnd, .left = left, .right = right});
    }
    return left;
  }

  absl::StatusOr<int> Term(int depth) {
    if (!Take("(")) return Comparison();
    if (depth >= kMaxDepth) return Expected("fewer parentheses");
    MOE_ASSIGN_OR_RETURN(const int inner, Or(depth + 1));
    if (!Take(")")) return Expected("')'");
    return inner;
  }

  absl::StatusOr<int> Comparison() {
    FailIf::Node node;
    const absl::string_view text = Rest();
    const auto end = std::find_if_not(text.begin(), text.end(), [](char c) {
      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
    });
    node.column = std::string(text.begin(), end);
    if (std::find(columns_.begin(), columns_.end(), node.column) == columns_.end()) {
      return Expected(absl::StrCat("a column: ", absl::StrJoin(columns_, ", ")));
    }
    rest_.remove_prefix(node.column.size());
    if (!TakeCompare(node.compare)) return Expected("<, <=, >, >=, == or !=");
    MOE_RETURN_IF_ERROR(Bound(node));
    return Add(std::move(node));
  }

  absl::Status Bound(FailIf::Node& node) {
    if (absl::StartsWith(Rest(), kBase)) {
      MOE_RETURN_IF_ERROR(TakeBase(node));
      node.number = 1;
      const bool divided = Take("/");
      if (!divided && !Take("*")) return absl::OkStatus();
      MOE_RETURN_IF_ERROR(Number(node.number));
      if (divided) node.number = 1 / node.number;
      return std::isfinite(node.number) ? absl::OkStatus() : Expected("no division by 0");
    }
    MOE_RETURN_IF_ERROR(Number(node.number));
    return Take("*") ? TakeBase(node) : absl::OkStatus();
  }

  absl::Status TakeBase(FailIf::Node& node) {
    if (!Take(kBase)) return Expected("base");
    if (base_ == FailIf::Base::kAbsent) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", result_.text_, "': base is what a row is compared with, which moe ",
                       "report --compare A B knows; expected a number"));
    }
    node.times_base = true;
    return absl::OkStatus();
  }

  absl::Status Number(double& number) {
    const absl::string_view text = Rest().substr(0, Rest().find_first_of(" \t&|)*"));
    if (!absl::SimpleAtod(text, &number) || !std::isfinite(number)) return Expected("a number");
    rest_.remove_prefix(text.size());
    return absl::OkStatus();
  }

  bool TakeCompare(Compare& compare) {
    // Longer ones first: "<=" begins with "<".
    const std::pair<const char*, Compare> kTokens[] = {
        {"<=", Compare::kLessEqual}, {">=", Compare::kGreaterEqual}, {"==", Compare::kEqual},
        {"!=", Compare::kNotEqual},  {"<", Compare::kLess},          {">", Compare::kGreater}};
    for (const auto& [token, meaning] : kTokens) {
      if (!Take(token)) continue;
      compare = meaning;
      return true;
    }
    return false;
  }

  static constexpr absl::string_view kBase = "base";

  absl::string_view rest_;
  const std::vector<std::string>& columns_;
  FailIf::Base base_;
  FailIf result_;
};

absl::StatusOr<FailIf> FailIf::Parse(absl::string_view text,
                                     const std::vector<std::string>& columns, Base base) {
  return FailIfParser(text, columns, base).Run();
}

bool FailIf::Holds(Lookup lookup, Lookup base) const {
  return root_ >= 0 && Holds(root_, lookup, base);
}

bool FailIf::Holds(int index, Lookup lookup, Lookup base) const {
  const Node& node = nodes_[index];
  if (node.kind == Kind::kAnd) {
    return Holds(node.left, lookup, base) && Holds(node.right, lookup, base);
  }
  if (node.kind == Kind::kOr) {
    return Holds(node.left, lookup, base) || Holds(node.right, lookup, base);
  }
  const std::optional<double> value = lookup(node.column);
  MOE_CHECK(value.has_value());
  const double bound = node.times_base ? node.number * base(node.column).value() : node.number;
  if (std::isnan(*value) || std::isnan(bound)) return false;
  switch (node.compare) {
    case Compare::kLess:
      return *value < bound;
    case Compare::kLessEqual:
      return *value <= bound;
    case Compare::kGreater:
      return *value > bound;
    case Compare::kGreaterEqual:
      return *value >= bound;
    case Compare::kEqual:
      return *value == bound;
    case Compare::kNotEqual:
      return *value != bound;
  }
  return false;
}

}  // namespace moe::bench
