#include "moe/report/page.h"

#include <absl/strings/str_cat.h>

#include "moe/report/format.h"

namespace moe::report {
namespace {

std::string Plural(size_t count, const char* thing) {
  return absl::StrCat(CountText(static_cast<double>(count)), " ", thing, count == 1 ? "" : "s");
}

std::string InputLine(const Run& run) {
  std::string size;
  switch (run.kind) {
    case RunKind::kBench:
      size = Plural(run.bench.size(), "row");
      break;
    case RunKind::kSweep:
      size = Plural(run.sweep.size(), "point");
      break;
    case RunKind::kTrain:
      size = Plural(run.steps.size(), "step");
      if (!run.totals.has_value()) size += ", did not end";
      break;
  }
  return absl::StrCat(
      "<li><b>", Escape(run.name), "</b> moe ", NameOf(run.kind), ", ", size,
      run.name == run.path ? "" : absl::StrCat(" <code>", Escape(run.path), "</code>"), "</li>\n");
}

std::string Head(absl::string_view title) {
  return absl::StrCat(
      "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src "
      "'unsafe-inline'; script-src 'sha256-",
      PageScriptHash(),
      "'; base-uri 'none'; form-action 'none'\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<meta name=\"color-scheme\" content=\"light dark\">\n<title>",
      Escape(title), "</title>\n<style>\n", PageStyle(), "</style>\n</head>\n");
}

}  // namespace

std::string Page(absl::string_view title, absl::Span<const Run> runs,
                 absl::Span<const Section> sections) {
  std::string html = absl::StrCat(Head(title), "<body>\n<header>\n<h1>", Escape(title),
                                  "</h1>\n<ul class=\"inputs\">\n");
  for (const Run& run : runs) absl::StrAppend(&html, InputLine(run));
  absl::StrAppend(&html, "</ul>\n");
  std::string links, body;
  int count = 0;
  for (const Section& s : sections) {
    if (s.empty()) continue;
    ++count;
    absl::StrAppend(&links, "<a href=\"#", s.id, "\">", Escape(s.heading), "</a>\n");
    absl::StrAppend(&body, "<section id=\"", s.id, "\">\n<h2>", Escape(s.heading), "</h2>\n",
                    s.body, "</section>\n");
  }
  if (count > 1) absl::StrAppend(&html, "<nav>\n", links, "</nav>\n");
  return absl::StrCat(
      html, "</header>\n<main>\n", body,
      "</main>\n<footer>Rest the pointer on a mark for its figures; click a heading "
      "of a table to sort by it.</footer>\n<script>",
      PageScript(), "</script>\n</body>\n</html>\n");
}

}  // namespace moe::report
