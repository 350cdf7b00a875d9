// The program `moe`, but for main().
#ifndef MOE_MOE_CLI_RUN_PROGRAM_H_
#define MOE_MOE_CLI_RUN_PROGRAM_H_

namespace moe::cli {

// What main does; returns its exit code.
int RunProgram(int argc, char** argv);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_RUN_PROGRAM_H_
