#include "moe/cli/command_help.h"

#include <absl/strings/str_cat.h>
#include <fmt/format.h>

#include "moe/cli/table_help.h"

namespace moe::cli {

std::string HelpText(const CommandHelp& help) {
  std::string text = help.head;
  if (!help.operands.words.empty()) absl::StrAppend(&text, "\n", help.operands.heading, "\n");
  for (const Operands::Word& word : help.operands.words) {
    text += fmt::format("  {:<14}  {}\n", word.name, word.help);
  }
  return absl::StrCat(text, TableHelp(help.settings), help.tail);
}

}  // namespace moe::cli
