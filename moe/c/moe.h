/* The library for programs in C11: MoE layers that are trained or run, on CPUs or CUDA devices,
 * over threads, MPI or NCCL. */
#ifndef MOE_MOE_C_MOE_H_
#define MOE_MOE_C_MOE_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Every call that can fail returns one. What refuses its arguments (MOE_INVALID_ARGUMENT,
 * MOE_FAILED_PRECONDITION) has done nothing; after another failure free the trainer. Pointers are
 * not null unless it is said. One thread of a rank at a time. */
typedef enum moe_code {
  MOE_OK = 0,
  MOE_INVALID_ARGUMENT = 3,
  MOE_DEADLINE_EXCEEDED = 4, /* a rank did not come */
  MOE_NOT_FOUND = 5,
  MOE_RESOURCE_EXHAUSTED = 8, /* memory, threads */
  MOE_FAILED_PRECONDITION = 9,
  MOE_ABORTED = 10, /* another rank has failed */
  MOE_OUT_OF_RANGE = 11,
  MOE_UNIMPLEMENTED = 12,
  MOE_INTERNAL = 13,
  MOE_UNAVAILABLE = 14,
  MOE_DATA_LOSS = 15 /* a file, or values that are not finite */
} moe_code;

/* Why the last call of this thread that failed did; until its next one. Never null. */
const char* moe_message(void);

/* ---- Ranks. One end of a world for each; it goes to moe_trainer_create or to moe_world_free. */
typedef struct moe_world moe_world;

/* Ranks that are threads of this process: worlds [ranks], one for each thread. timeout_s: the
 * longest that a rank waits for others without progress, in seconds; 0 = 60. */
moe_code moe_world_threads(int ranks, double timeout_s, moe_world** worlds);
/* Ranks that are the processes of `comm`, as MPI_Comm_c2f gives it, of MPI that the program has
 * started with MPI_THREAD_MULTIPLE and ends. Collective. What becomes of the world and of MPI when
 * a rank fails: comm/mpi/mpi_world.h. */
moe_code moe_world_mpi(int64_t comm, double timeout_s, moe_world** world);
/* Ranks that have a CUDA device each, no two the same: all `ranks` that know `id`, which is for one
 * world, made by one rank and sent to the others by the program: moe_nccl_id's, or the bytes of an
 * ncclUniqueId of its own. `device`: CUDA ordinal. Collective. MOE_UNIMPLEMENTED in a build without
 * NCCL; else comm/nccl/nccl_world.h. */
enum { MOE_NCCL_ID_BYTES = 128 };
moe_code moe_nccl_id(char id[MOE_NCCL_ID_BYTES]);
moe_code moe_world_nccl(const char id[MOE_NCCL_ID_BYTES], int rank, int ranks, int device,
                        double timeout_s, moe_world** world);
int moe_world_rank(const moe_world* world);
int moe_world_size(const moe_world* world);
void moe_world_free(moe_world* world); /* may be null */

/* ---- What one rank trains or runs. Where the trainer has a CUDA stream, rows, gradients and
 * masters are memory of the stream's device, and moe_forward, moe_backward, moe_gradient and
 * moe_refresh return when their work is in the stream; all else is memory of the host. */
typedef enum moe_dtype { MOE_FLOAT32 = 0, MOE_BFLOAT16, MOE_FLOAT16 } moe_dtype;
typedef enum moe_numerics { MOE_LAYOUT_INVARIANT = 0, MOE_FAST } moe_numerics;
/* The order in which products of bfloat16 add their terms on a CPU (docs/bf16.md). Auto is tile
 * where every rank has AMX, else dot. */
typedef enum moe_bf16_order { MOE_BF16_AUTO = 0, MOE_BF16_DOT, MOE_BF16_TILE } moe_bf16_order;

/* A field that is 0 has the value in brackets. */
typedef struct moe_trainer_options {
  int expert_parallel_size; /* ranks that hold every expert once; divides the world's size [1] */
  int threads;              /* threads of this rank [1] */
  moe_dtype dtype;          /* type of rows, and of weights as layers read them [float32] */
  moe_numerics numerics;    /* [the same bits for any number of ranks] */
  int64_t micro_batches;    /* number in a step, over all ranks [one for each] */
  uint64_t seed;            /* seed of initial weights */
  double clip_grad;         /* the largest gradient norm [1]; below 0: any */
  double weight_decay;      /* AdamW's, for matrices [0.1]; below 0: none */
  /* A cudaStream_t of the program's, none of CUDA's default ones: layers compute in it, on its
   * device, until moe_trainer_free. A world of moe_world_nccl is of that device [the CPU] */
  void* cuda_stream;
  /* log2 of the unit of the exact grid on which gradients add up: what moe_grid_unit_log2 said
   * where a run goes on [from the gradients] */
  int grid_unit_log2;
  /* The same on all ranks: what moe_trainer_bf16_order said where a run goes on [auto]. Of
   * MOE_BFLOAT16 on a CPU alone */
  moe_bf16_order bf16_order;
} moe_trainer_options;

typedef struct moe_trainer moe_trainer;
typedef struct moe_layer moe_layer;

/* Takes `world`, also when it fails; null = one rank alone. Collective. */
moe_code moe_trainer_create(const moe_trainer_options* options, moe_world* world,
                            moe_trainer** trainer);
/* And its layers. Inside a step it ends the world, so that no other rank waits. May be null. */
void moe_trainer_free(moe_trainer* trainer);

typedef enum moe_frozen {
  MOE_TRAIN_ALL = 0,
  MOE_FREEZE_ROUTER,
  MOE_FREEZE_EXPERTS,
  MOE_FREEZE_ALL
} moe_frozen;

typedef struct moe_layer_config {
  const char* gate;                      /* a gate's name, docs/routing.md ["mixtral"] */
  int32_t num_experts;                   /* over all ranks */
  int32_t top_k;                         /* experts of a token [2] */
  int64_t hidden_size, ffn_hidden_size;  /* H; F of one expert */
  int64_t shared_expert_ffn_hidden_size; /* [no shared expert] */
  float aux_loss_coeff, z_loss_coeff;    /* coefficients of the router's loss */
  double capacity_factor;                /* 1.1 is 11/10 [no token is dropped] */
  moe_frozen frozen; /* what has no gradient; in 16 bits its matrices have 2 bytes an element */
} moe_layer_config;

/* Before the first step. The layer is the trainer's; its parameters' names begin with `prefix`,
 * which is its own. SwiGLU experts; what else a gate reads has its default. Collective. */
moe_code moe_layer_create(moe_trainer* trainer, const char* prefix, const moe_layer_config* config,
                          moe_layer** layer);
/* A layer as transformers' config.json and safetensors files in `folder` have it; `index`: which
 * layer of the model, -1 = the first with experts. MOE_DATA_LOSS names what is wrong in a file. */
moe_code moe_layer_load(moe_trainer* trainer, const char* prefix, const char* folder, int64_t index,
                        moe_frozen frozen, moe_layer** layer);

/* ---- A step is moe_rounds() times { moe_begin_round, forward and backward of every layer }, then
 * moe_step. An evaluation begins with moe_begin_evaluation, has no backward, and ends with
 * moe_end_step. All ranks make the same calls. */
int64_t moe_rounds(const moe_trainer* trainer);
/* micro_batch: which of the step's is this rank's in this round; -1: none, then pass no tokens. May
 * be null. */
moe_code moe_begin_round(moe_trainer* trainer, int64_t* micro_batch);
moe_code moe_begin_evaluation(moe_trainer* trainer, int64_t micro_batches);
/* y = layer(x), both [tokens, H] of the trainer's dtype in row-major order. x stays until the
 * backward call, so y is other memory; in an evaluation y may be x. Collective, as moe_backward.
 * MOE_INVALID_ARGUMENT: memory that overlaps otherwise, or null with tokens. */
moe_code moe_forward(moe_layer* layer, const void* x, int64_t tokens, void* y);
/* The same of rows [rows, H] of which some are padding: padding_mask [rows], memory of the host,
 * not 0 = padding; null = none. Such a row of x is not read: it is not routed, takes no capacity,
 * and counts in no loss. Its row of y is 0, and in moe_backward, which does not read its dy, that
 * of dx. All else has the bits of a call without these rows. */
moe_code moe_forward_padded(moe_layer* layer, const void* x, int64_t rows,
                            const uint8_t* padding_mask, void* y);
/* dx [tokens, H] is overwritten, and overlaps no memory of x; without shared or identity experts
 * it may be dy. Gradients of weights are added. dy: of the micro-batch's loss, of which the
 * router's is a term. */
moe_code moe_backward(moe_layer* layer, const void* dy, void* dx);
/* The loss of the last forward call, for which it waits; NaN if that failed (moe_message). */
double moe_router_loss(const moe_layer* layer);
/* AdamW with the mean gradient of the micro-batches. gradient_norm: before clipping; may be null.
 * MOE_DATA_LOSS: gradients, or on a CUDA device a router's logit, that are not finite; no weight
 * has moved. Also weights that have moved and are not finite: the trainer is of no more use. */
moe_code moe_step(moe_trainer* trainer, double learning_rate, double* gradient_norm);

/* With an optimiser of the program's own in place of moe_step: moe_reduce, moe_clip_grad_norm or
 * not, moe_gradient and moe_write of each parameter that is trained, then moe_end_step. */
moe_code moe_reduce(moe_trainer* trainer); /* sums the gradients over ranks */
/* As torch.nn.utils.clip_grad_norm_: makes the L2 norm of the mean gradient of all ranks' weights
 * `most` where it is more, as moe_gradient gives it from now on. norm: before that; may be
 * null. most: INFINITY = the norm alone. MOE_DATA_LOSS: gradients that are not finite. It is
 * collective. */
moe_code moe_clip_grad_norm(moe_trainer* trainer, double most, double* norm);
moe_code moe_end_step(moe_trainer* trainer);

/* What rounding to the exact grid took of the step's gradients, at most: of the tensor of which it
 * took most, relative to its norm. tensor: its name where that is above 1e-6, else "", until the
 * next step begins; may be null. Once moe_step, moe_clip_grad_norm or moe_end_step have measured
 * it; 0 before, and in MOE_FAST. A warning (stderr) tells of the first such step. */
double moe_grid_loss(const moe_trainer* trainer, const char** tensor);
/* In the steps to come. */
int moe_grid_unit_log2(const moe_trainer* trainer);
/* MOE_BF16_AUTO where the trainer has no products of bfloat16 on a CPU. */
moe_bf16_order moe_trainer_bf16_order(const moe_trainer* trainer);

/* ---- Weights that this rank holds, of all layers. The set is fixed from the first step on. */
typedef struct moe_parameter {
  const char* name; /* as the trainer lives */
  int64_t rows, cols;
  int trained;   /* 0: frozen, or state that moe_end_step moves, which is memory of the host */
  float* master; /* [rows, cols] row-major; null: frozen in 16 bits, moe_read has the values */
} moe_parameter;

int64_t moe_parameter_count(const moe_trainer* trainer);
moe_code moe_parameter_at(const moe_trainer* trainer, int64_t index, moe_parameter* parameter);
/* values [rows * cols], memory of the host. moe_read waits for the stream. */
moe_code moe_read(const moe_trainer* trainer, int64_t index, float* values);
moe_code moe_write(moe_trainer* trainer, int64_t index, const float* values);
/* After the program has changed a master in place: what layers read in 16 bits follows. */
moe_code moe_refresh(moe_trainer* trainer, int64_t index);
/* After moe_reduce, until the next step begins: the mean over the micro-batches, clipped if it was.
 * gradient [rows * cols]. */
moe_code moe_gradient(moe_trainer* trainer, int64_t index, float* gradient);
/* From now on the master is `values`, which stay: memory of the program's own framework.
 * MOE_UNIMPLEMENTED on a CUDA device. */
moe_code moe_adopt(moe_trainer* trainer, int64_t index, float* values);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* MOE_MOE_C_MOE_H_ */
