// --layouts: which values every axis of a layout takes.
#ifndef MOE_MOE_CLI_VERIFY_VERIFY_LAYOUTS_H_
#define MOE_MOE_CLI_VERIFY_VERIFY_LAYOUTS_H_

#include <string>

#include <absl/status/statusor.h>

#include "moe/cli/verify/layout.h"

namespace moe::cli {

struct LayoutRequest {
  verify::LayoutAxes axes;
  bool names_mpi = false;  // asked for, so its absence is an error
  bool names_transport = false, names_dispatch = false, names_capacity = false;
};

// "ranks=1,2,4 ep=all transport=local,mpi dispatch=staged,direct overlap=1,4 capacity=none,1.0":
// any of the axes, in any order, separated by spaces; the others keep their defaults.
// kInvalidArgument names what is wrong and the nearest valid choice.
absl::StatusOr<LayoutRequest> ParseLayouts(const std::string& text);

}  // namespace moe::cli

#endif  // MOE_MOE_CLI_VERIFY_VERIFY_LAYOUTS_H_
