// The page: one HTML file that needs nothing else.
#ifndef MOE_MOE_REPORT_PAGE_H_
#define MOE_MOE_REPORT_PAGE_H_

#include <string>

#include <absl/strings/string_view.h>
#include <absl/types/span.h>

#include "moe/report/rows.h"
#include "moe/report/sections.h"

namespace moe::report {

// Sections that are empty are left out. The same arguments give the same bytes. The page loads
// nothing, and its Content-Security-Policy lets only its own script run, by its hash: a text that
// got past escaping would still not run.
std::string Page(absl::string_view title, absl::Span<const Run> runs,
                 absl::Span<const Section> sections);

// Its style and its script. The script sorts tables; then it checks the page and says so in
// attributes of <html>: data-charts, data-marks and data-tables count what is there, and data-check
// is "ok", or what is wrong: a script error, or a chart without the marks it was drawn with.
std::string PageStyle();
absl::string_view PageScript();
// base64 of the script's SHA-256.
absl::string_view PageScriptHash();

}  // namespace moe::report

#endif  // MOE_MOE_REPORT_PAGE_H_
