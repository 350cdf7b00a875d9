// The program `moe`.
#include "moe/cli/base/command.h"

int main(int argc, char** argv) {
  return moe::cli::RunProgram(argc, argv);
}
