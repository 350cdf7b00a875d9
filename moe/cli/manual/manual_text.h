// Text as the source of a manual page: man's macros, for groff and mandoc.
#ifndef MOE_MOE_CLI_MANUAL_MANUAL_TEXT_H_
#define MOE_MOE_CLI_MANUAL_MANUAL_TEXT_H_

#include <string>
#include <utility>
#include <vector>

#include <absl/strings/string_view.h>

namespace moe::cli {

// A paragraph of CommandHelp, by lines.
using Paragraph = std::vector<std::string>;
std::vector<Paragraph> ParagraphsOf(absl::string_view text);

// Nothing in it means anything to the formatter. Of one line.
std::string ManualEscaped(absl::string_view text);

std::string ManualTitle(absl::string_view page, absl::string_view version);
std::string ManualSection(absl::string_view heading);
std::string ManualSubsection(absl::string_view heading);

// Indented lines as they are, those from the margin filled.
std::string ManualParagraph(const Paragraph& paragraph);

// An entry with its explanation: `tag` is source, `text` is not.
std::string ManualEntry(absl::string_view tag, absl::string_view text);

// "Exit codes: 0 ok, 1 a check failed, ..." in parts. Empty if it is something else.
std::vector<std::pair<std::string, std::string>> ExitCodesOf(const Paragraph& paragraph);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_MANUAL_MANUAL_TEXT_H_
