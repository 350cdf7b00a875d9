// The program `moe`.
#include "moe/cli/commands.h"

int main(int argc, char** argv) {
  return moe::cli::RunProgram(argc, argv);
}
