// Run by the build: write_manual FOLDER writes moe.1 and a page per command there.
#include <cstdio>
#include <string>

#include <absl/status/status.h>
#include <absl/strings/str_cat.h>

#include "kernels/base/status_macros.h"
#include "moe/cli/manual/manual.h"
#include "moe/io/file.h"

namespace moe::cli {
namespace {

absl::Status Write(const std::string& path, const std::string& page) {
  MOE_ASSIGN_OR_RETURN(WholeFile file, WholeFile::Create(path));
  MOE_RETURN_IF_ERROR(file.Append(page));
  return file.Commit();
}

absl::Status WriteAll(const std::string& folder) {
  MOE_RETURN_IF_ERROR(Write(folder + "/moe.1", ProgramManual()));
  for (const Command& command : Commands()) {
    MOE_RETURN_IF_ERROR(
        Write(absl::StrCat(folder, "/moe-", command.name, ".1"), CommandManual(command)));
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace moe::cli

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fputs("usage: write_manual FOLDER\n", stderr);
    return 2;
  }
  const absl::Status status = moe::cli::WriteAll(argv[1]);
  if (status.ok()) return 0;
  std::fprintf(stderr, "write_manual: %s\n", std::string(status.message()).c_str());
  return 4;
}
