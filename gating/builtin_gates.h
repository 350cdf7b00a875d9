// The gates that come with the library, one file each. Internal to gating/.
#ifndef MOE_GATING_BUILTIN_GATES_H_
#define MOE_GATING_BUILTIN_GATES_H_

#include "gating/gate.h"

namespace moe {

GateDefinition SwitchGateDefinition();
GateDefinition GshardGateDefinition();
GateDefinition TopKGateDefinition();
GateDefinition MixtralGateDefinition();
GateDefinition Qwen2GateDefinition();
GateDefinition Qwen3GateDefinition();
GateDefinition OlmoeGateDefinition();
GateDefinition DeepSeekV2GateDefinition();
GateDefinition DeepSeekV3GateDefinition();
GateDefinition GptOssGateDefinition();
GateDefinition Llama4GateDefinition();
GateDefinition LongCatGateDefinition();
GateDefinition ExpertChoiceGateDefinition();
GateDefinition NoisyTopKGateDefinition();
GateDefinition SinkhornGateDefinition();

}  // namespace moe

#endif  // MOE_GATING_BUILTIN_GATES_H_
