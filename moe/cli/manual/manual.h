// Manual pages, made from what --help prints.
#ifndef MOE_MOE_CLI_MANUAL_MANUAL_H_
#define MOE_MOE_CLI_MANUAL_MANUAL_H_

#include <string>

#include "moe/cli/base/command.h"

namespace moe::cli {

// How a first day goes; the lines stand in moe --help too.
inline constexpr char kProgramExamples[] =
    R"(  moe doctor
  moe train --data book.txt --ranks 4 --ep 2 --num-experts 8 --topk 2 --out run
  mpirun -n 4 moe bench alltoall -J alltoall.json
  moe report run alltoall.json
)";

// moe.1: commands, exit codes, environment, files; source of a page in man's macros.
std::string ProgramManual();

// moe-NAME.1, one of Commands().
std::string CommandManual(const Command& command);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_MANUAL_MANUAL_H_
