// Numbers and untrusted texts, formatted for a page.
#ifndef MOE_MOE_CLI_REPORT_FORMAT_H_
#define MOE_MOE_CLI_REPORT_FORMAT_H_

#include <string>

#include <absl/strings/string_view.h>

namespace moe::report {

// `text` as character data or a quoted attribute value of HTML and XML: & < > " ' become
// references; control characters, and bytes that are not UTF-8, become U+FFFD.
std::string Escape(absl::string_view text);

// At most `digits` significant digits, no trailing zeros, thousands separated: "0.0123", "12.3",
// "1,235", "1.2e-07". "–" if not finite.
std::string NumberText(double value, int digits = 3);

// Whole numbers with thousands separated: "131,072". "–" if not finite.
std::string CountText(double value);

// Different numbers have different texts: whole ones as by CountText, others with as many digits as
// needed.
std::string ExactText(double value);

// "1 rank", "2 ranks".
std::string Plural(double count, absl::string_view thing);

// In units of 1024: "512 B", "1 KiB", "1.5 MiB".
std::string BytesText(double bytes);

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_FORMAT_H_
