// The program `moe`.
#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include "moe/cli/commands.h"
#include "moe/cli/suggest.h"

namespace moe::cli {
namespace {

std::string Help() {
  std::string text =
      "usage: moe COMMAND [flags]\n\n"
      "Mixture-of-experts layers whose experts are sharded over ranks.\n\n";
  for (const Command& c : Commands()) text += fmt::format("  {:<10} {}\n", c.name, c.summary);
  return text +
         "\n  moe COMMAND --help     flags, defaults and formulas of a command\n"
         "  moe --version\n";
}

int Usage(const std::string& problem) {
  fmt::print(stderr, "moe: {}\n", problem);
  return static_cast<int>(ExitCode::kUsage);
}

const Command* Find(const std::string& name) {
  for (const Command& c : Commands()) {
    if (name == c.name) return &c;
  }
  return nullptr;
}

int Main(Invocation invocation) {
  if (invocation.args.empty()) return Usage("no command, expected moe COMMAND; see moe --help");
  std::string name = invocation.args.front();
  invocation.args.erase(invocation.args.begin());
  if (name == "--version") {
    fmt::print("moe {}\n", MOE_VERSION);
    return 0;
  }
  if (name == "help" && !invocation.args.empty()) {
    name = invocation.args.front();
    invocation.args = {"--help"};
  }
  if (name == "help" || name == "--help" || name == "-h") {
    fmt::print("{}", Help());
    return 0;
  }
  if (const Command* const command = Find(name)) {
    return static_cast<int>(command->run(invocation));
  }
  std::vector<std::string> names = {"help"};
  for (const Command& c : Commands()) names.emplace_back(c.name);
  return Usage(fmt::format("unknown command '{}'{}", name,
                           DidYouMean(name, names, "", "; moe --help lists all commands")));
}

}  // namespace
}  // namespace moe::cli

int main(int argc, char** argv) {
  try {
    moe::cli::Invocation invocation;
    invocation.program = argc > 0 ? argv[0] : "moe";
    invocation.args.assign(argv + (argc > 0 ? 1 : 0), argv + argc);
    for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
      invocation.environment.emplace_back(*entry);
    }
    return moe::cli::Main(std::move(invocation));
  } catch (const std::bad_alloc&) {
    std::fputs("moe: out of memory\n", stderr);
    return static_cast<int>(moe::cli::ExitCode::kMemory);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "moe: %s\n", e.what());
    return static_cast<int>(moe::cli::ExitCode::kCheckFailed);
  }
}
