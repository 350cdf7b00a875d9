// "Did you mean": the known word nearest to a mistyped one.
#ifndef MOE_MOE_CLI_BASE_SUGGEST_H_
#define MOE_MOE_CLI_BASE_SUGGEST_H_

#include <string>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::cli {

// Edits that turn `a` into `b`: insert, delete, replace, swap neighbours.
int EditDistance(absl::string_view a, absl::string_view b);

// The nearest of `known`, or "" if none is near: at most a third of the letters wrong (two in short
// words), else a name of which `word` is a part. Ties: the first.
std::string Nearest(absl::string_view word, const std::vector<std::string>& known);

// "; did you mean '<prefix><nearest>'?", or `otherwise` if nothing is near.
std::string DidYouMean(absl::string_view word, const std::vector<std::string>& known,
                       absl::string_view prefix, absl::string_view otherwise);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_BASE_SUGGEST_H_
