#include "moe/bench/fail_if.h"

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
  FailIfParser(absl::string_view text, const std::vector<std::string>& columns)
      : rest_(text), columns_(columns) {
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
    const absl::string_view number = Rest().substr(0, Rest().find_first_of(" \t&|)"));
    if (!absl::SimpleAtod(number, &node.number) || !std::isfinite(node.number)) {
      return Expected("a number");
    }
    rest_.remove_prefix(number.size());
    return Add(std::move(node));
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

  absl::string_view rest_;
  const std::vector<std::string>& columns_;
  FailIf result_;
};

absl::StatusOr<FailIf> FailIf::Parse(absl::string_view text,
                                     const std::vector<std::string>& columns) {
  return FailIfParser(text, columns).Run();
}

bool FailIf::Holds(Lookup lookup) const {
  return root_ >= 0 && Holds(root_, lookup);
}

bool FailIf::Holds(int index, Lookup lookup) const {
  const Node& node = nodes_[index];
  if (node.kind == Kind::kAnd) return Holds(node.left, lookup) && Holds(node.right, lookup);
  if (node.kind == Kind::kOr) return Holds(node.left, lookup) || Holds(node.right, lookup);
  const std::optional<double> value = lookup(node.column);
  MOE_CHECK(value.has_value());
  if (std::isnan(*value)) return false;
  switch (node.compare) {
    case Compare::kLess:
      return *value < node.number;
    case Compare::kLessEqual:
      return *value <= node.number;
    case Compare::kGreater:
      return *value > node.number;
    case Compare::kGreaterEqual:
      return *value >= node.number;
    case Compare::kEqual:
      return *value == node.number;
    case Compare::kNotEqual:
      return *value != node.number;
  }
  return false;
}

}  // namespace moe::bench
