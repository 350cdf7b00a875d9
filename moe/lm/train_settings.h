// The settings of a training run by name. Ranks compare these rows, a checkpoint holds them, and
// flags set their fields.
#ifndef MOE_MOE_LM_TRAIN_SETTINGS_H_
#define MOE_MOE_LM_TRAIN_SETTINGS_H_

#include "moe/layer/moe_layer.h"
#include "moe/lm/training_loop.h"
#include "moe/run/settings.h"

namespace moe::lm {

// Incremented when steps produce other bits (docs/architecture.md, numerics contract).
inline constexpr int kNumericsVersion = 5;
inline constexpr char kNumericsVersionName[] = "version of the numerics";

// Every setting of `config`, which outlives the rows, except what neither results nor exchanges
// between ranks depend on (threads, packed weights), and records and traces (CheckRecords). The
// `before` of attention's heads and of the order of bfloat16 follows from `config` as it is at the
// call.
SettingRows RowsOf(TrainConfig& config);

// The rows of one MoE layer alone.
SettingRows RowsOf(MoeLayerConfig& layer);

}  // namespace moe::lm

#endif  // MOE_MOE_LM_TRAIN_SETTINGS_H_
