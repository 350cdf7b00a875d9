#include "moe/cli/measure/fail_if.h"

#include <algorithm>
#include <cmath>

#include <absl/strings/ascii.h>
#include <absl/strings/match.h>
#include <absl/strings/numbers.h>
#include <absl/strings/str_cat.h>
#include <absl/strings/str_join.h>
#include <absl/strings/strip.h>

#include "kernels/base/status_macros.h"

namespace moe::measure {

// Recursive descent over rest_; each function returns what holds of a row.
class FailIfParser {
 public:
  FailIfParser(absl::string_view text, const std::vector<std::string>& columns, FailIf::Base base)
      : text_(text), rest_(text), columns_(columns), base_(base) {}

  absl::StatusOr<FailIf> Run() {
    MOE_ASSIGN_OR_RETURN(Rule rule, Or(0));
    if (!Rest().empty()) return Expected("&&, || or the end");
    return FailIf(std::string(text_), std::move(rule));
  }

 private:
  using Rule = FailIf::Rule;
  using Lookup = FailIf::Lookup;
  using Compare = bool (*)(double, double);

  // Value that a column is compared with.
  struct Limit {
    double number = 0;
    bool times_base = false;
  };

  // Limits recursion: no bound written by hand nests deeper, and the stack is finite.
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
        absl::StrCat("'", text_, "': at ", found, ", expected ", what));
  }

  absl::StatusOr<Rule> Or(int depth) {
    MOE_ASSIGN_OR_RETURN(Rule left, And(depth));
    while (Take("||")) {
      MOE_ASSIGN_OR_RETURN(Rule right, And(depth));
      left = [a = std::move(left), b = std::move(right)](Lookup lookup, Lookup base) {
        return a(lookup, base) || b(lookup, base);
      };
    }
    return left;
  }

  absl::StatusOr<Rule> And(int depth) {
    MOE_ASSIGN_OR_RETURN(Rule left, Term(depth));
    while (Take("&&")) {
      MOE_ASSIGN_OR_RETURN(Rule right, Term(depth));
      left = [a = std::move(left), b = std::move(right)](Lookup lookup, Lookup base) {
        return a(lookup, base) && b(lookup, base);
      };
    }
    return left;
  }

  absl::StatusOr<Rule> Term(int depth) {
    if (!Take("(")) return Comparison();
    if (depth >= kMaxDepth) return Expected("fewer parentheses");
    MOE_ASSIGN_OR_RETURN(Rule inner, Or(depth + 1));
    if (!Take(")")) return Expected("')'");
    return inner;
  }

  absl::StatusOr<Rule> Comparison() {
    const absl::string_view text = Rest();
    const auto end = std::find_if_not(text.begin(), text.end(), [](char c) {
      return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_';
    });
    const std::string column(text.begin(), end);
    if (std::find(columns_.begin(), columns_.end(), column) == columns_.end()) {
      return Expected(absl::StrCat("a column: ", absl::StrJoin(columns_, ", ")));
    }
    rest_.remove_prefix(column.size());
    const Compare compare = TakeCompare();
    if (compare == nullptr) return Expected("<, <=, >, >=, == or !=");
    Limit limit;
    MOE_RETURN_IF_ERROR(TakeLimit(limit));
    return [column, compare, limit](Lookup lookup, Lookup base) {
      const double value = lookup(column).value();
      const double bound = limit.times_base ? limit.number * base(column).value() : limit.number;
      return !std::isnan(value) && !std::isnan(bound) && compare(value, bound);
    };
  }

  absl::Status TakeLimit(Limit& limit) {
    if (absl::StartsWith(Rest(), kBase)) {
      MOE_RETURN_IF_ERROR(TakeBase(limit));
      limit.number = 1;
      const bool divided = Take("/");
      if (!divided && !Take("*")) return absl::OkStatus();
      MOE_RETURN_IF_ERROR(Number(limit.number));
      if (divided) limit.number = 1 / limit.number;
      return std::isfinite(limit.number) ? absl::OkStatus() : Expected("no division by 0");
    }
    MOE_RETURN_IF_ERROR(Number(limit.number));
    return Take("*") ? TakeBase(limit) : absl::OkStatus();
  }

  absl::Status TakeBase(Limit& limit) {
    if (!Take(kBase)) return Expected("base");
    if (base_ == FailIf::Base::kAbsent) {
      return absl::InvalidArgumentError(
          absl::StrCat("'", text_, "': base is what a row is compared with, which moe ",
                       "report --compare A B knows; expected a number"));
    }
    limit.times_base = true;
    return absl::OkStatus();
  }

  absl::Status Number(double& number) {
    const absl::string_view text = Rest().substr(0, Rest().find_first_of(" \t&|)*"));
    if (!absl::SimpleAtod(text, &number) || !std::isfinite(number)) return Expected("a number");
    rest_.remove_prefix(text.size());
    return absl::OkStatus();
  }

  template <typename Relation>
  static bool Holds(double a, double b) {
    return Relation()(a, b);
  }

  // nullptr: there is none.
  Compare TakeCompare() {
    // Longer ones first: "<=" begins with "<".
    static constexpr std::pair<const char*, Compare> kTokens[] = {
        {"<=", Holds<std::less_equal<>>}, {">=", Holds<std::greater_equal<>>},
        {"==", Holds<std::equal_to<>>},   {"!=", Holds<std::not_equal_to<>>},
        {"<", Holds<std::less<>>},        {">", Holds<std::greater<>>}};
    for (const auto& [token, compare] : kTokens) {
      if (Take(token)) return compare;
    }
    return nullptr;
  }

  static constexpr absl::string_view kBase = "base";

  const absl::string_view text_;
  absl::string_view rest_;
  const std::vector<std::string>& columns_;
  const FailIf::Base base_;
};

absl::StatusOr<FailIf> FailIf::Parse(absl::string_view text,
                                     const std::vector<std::string>& columns, Base base) {
  return FailIfParser(text, columns, base).Run();
}

}  // namespace moe::measure
