// The program `moe`.
#include "moe/cli/run_program.h"

int main(int argc, char** argv) {
  return moe::cli::RunProgram(argc, argv);
}
