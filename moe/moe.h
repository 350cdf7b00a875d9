// The library's front door: everything a program needs to insert, run and train MoE layers.
#ifndef MOE_MOE_MOE_H_
#define MOE_MOE_MOE_H_

#if __cplusplus < 202002L
#error moe needs C++20: compile with -std=c++20
#endif

// IWYU pragma: begin_exports
#include "comm/create.h"
#include "comm/mpi/mpi_world.h"
#include "comm/nccl/nccl_store.h"
#include "gating/token_choice_gate.h"
#include "kernels/elementwise/elementwise.h"
#include "moe/layer/moe_layer.h"
#include "moe/main.h"
#include "moe/run/pass.h"
#include "moe/run/session.h"
#include "moe/run/trace_export.h"
#include "moe/state/parameter.h"
#include "moe/state/weight_lease.h"
#include "moe/tensor/linear.h"
#include "moe/tensor/own_rows.h"
#include "moe/train/gradient_reducer.h"
#include "moe/train/optimizer.h"
#include "moe/train/trainer.h"
// IWYU pragma: end_exports

#endif  // MOE_MOE_MOE_H_
