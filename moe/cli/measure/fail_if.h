// --fail-if: a bound on results, for continuous integration.
#ifndef MOE_MOE_CLI_MEASURE_FAIL_IF_H_
#define MOE_MOE_CLI_MEASURE_FAIL_IF_H_

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <absl/functional/function_ref.h>
#include <absl/status/statusor.h>
#include <absl/strings/string_view.h>

namespace moe::measure {

// An expression over the columns of one row:
//   or      = and { "||" and }
//   and     = term { "&&" term }
//   term    = "(" or ")" | column op bound
//   op      = "<" | "<=" | ">" | ">=" | "==" | "!="
//   bound   = number | number "*" "base" | "base" [ ("*" | "/") number ]
// `base` is the same column of the row that this row is compared with: "busbw < 0.9 * base".
// A column or a base without a value (NaN) makes every comparison false: what was not measured
// fails nothing.
class FailIf {
 public:
  // Whether rows are compared with others; if not, `base` is refused.
  enum class Base : uint8_t { kAbsent, kPresent };

  // kInvalidArgument with the position and what was expected; a column must be one of `columns`.
  static absl::StatusOr<FailIf> Parse(absl::string_view text,
                                      const std::vector<std::string>& columns,
                                      Base base = Base::kAbsent);

  // The value of a column that Parse accepted, in the row or in the row it is compared with.
  using Lookup = absl::FunctionRef<std::optional<double>(absl::string_view column)>;
  bool Holds(Lookup lookup, Lookup base) const { return holds_(lookup, base); }
  bool Holds(Lookup lookup) const { return Holds(lookup, lookup); }  // for Base::kAbsent

  const std::string& text() const { return text_; }

 private:
  friend class FailIfParser;
  using Rule = std::function<bool(Lookup lookup, Lookup base)>;
  FailIf(std::string text, Rule holds) : text_(std::move(text)), holds_(std::move(holds)) {}

  std::string text_;
  Rule holds_;
};

}  // namespace moe::measure

#endif  // MOE_MOE_CLI_MEASURE_FAIL_IF_H_
