// Files that every page contains, embedded in a source by the build (moe/cli/CMakeLists.txt).
#ifndef MOE_MOE_CLI_REPORT_PAGE_RESOURCES_H_
#define MOE_MOE_CLI_REPORT_PAGE_RESOURCES_H_

namespace moe::report {

struct PageResource {
  const char* text;
  const char* sha256;  // in hexadecimal
};
extern const PageResource kStyle;         // page.css
extern const PageResource kScript;        // page.js
extern const PageResource kChartLibrary;  // Chart.js, minified, with the notice of its licence

}  // namespace moe::report

#endif  // MOE_MOE_CLI_REPORT_PAGE_RESOURCES_H_
