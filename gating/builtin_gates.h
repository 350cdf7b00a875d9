// The gates that come with the library. Internal to gating/.
#ifndef MOE_GATING_BUILTIN_GATES_H_
#define MOE_GATING_BUILTIN_GATES_H_

#include <vector>

#include "gating/gate.h"

namespace moe {

// All of them, in the order of the documentation.
std::vector<GateDefinition> BuiltinGates();

// Those with a file of their own.
GateDefinition GshardGateDefinition();
GateDefinition ExpertChoiceGateDefinition();
GateDefinition NoisyTopKGateDefinition();
GateDefinition SinkhornGateDefinition();
GateDefinition SparseMixerGateDefinition();

}  // namespace moe

#endif  // MOE_GATING_BUILTIN_GATES_H_
