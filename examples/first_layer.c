/* The layer of first_layer.cc, in C: 8 experts, divided over pairs of ranks, learn to negate their
 * input. 4 ranks as threads of the program's own; with MPI, moe_world_mpi in their place. */
#include <math.h>
#include <moe/c/moe.h>
#include <pthread.h>
#include <stdio.h>

enum { kRanks = 4, kTokens = 64, kHidden = 16, kElements = kTokens * kHidden };

#define RETURN_IF_ERROR(call)                        \
  do {                                               \
    const moe_code code_of_call = (call);            \
    if (code_of_call != MOE_OK) return code_of_call; \
  } while (0)

static moe_code TrainSteps(moe_trainer* trainer, int rank) {
  const moe_layer_config config = {.num_experts = 8, .hidden_size = kHidden, .ffn_hidden_size = 32};
  moe_layer* layer = NULL;
  RETURN_IF_ERROR(moe_layer_create(trainer, "layer.", &config, &layer));
  static _Thread_local float x[kElements], y[kElements], dy[kElements], dx[kElements];
  for (int i = 0; i < kElements; ++i) x[i] = sinf((float)(i * i + rank));
  for (int step = 1; step <= 200; ++step) {
    RETURN_IF_ERROR(moe_begin_round(trainer, NULL));
    RETURN_IF_ERROR(moe_forward(layer, x, kTokens, y));
    float loss = 0; /* mean of (y + x)^2 / 2 */
    for (int i = 0; i < kElements; ++i) {
      dy[i] = (y[i] + x[i]) / kElements;
      loss += dy[i] * (y[i] + x[i]) / 2;
    }
    RETURN_IF_ERROR(moe_backward(layer, dy, dx));
    RETURN_IF_ERROR(moe_step(trainer, 0.01, NULL));
    if (rank == 0 && step % 50 == 0) printf("step %3d  loss %.4f\n", step, (double)loss);
  }
  return MOE_OK;
}

/* One rank; its end of the world goes to the trainer. */
static moe_code Train(moe_world* world) {
  const int rank = moe_world_rank(world);
  const moe_trainer_options options = {.expert_parallel_size = 2, .seed = 1};
  moe_trainer* trainer = NULL;
  RETURN_IF_ERROR(moe_trainer_create(&options, world, &trainer));
  const moe_code code = TrainSteps(trainer, rank);
  moe_trainer_free(trainer); /* of a rank that failed: the others learn of it */
  return code;
}

static void* RunRank(void* world) {
  static const char failed[] = "failed";
  if (Train(world) == MOE_OK) return NULL;
  fprintf(stderr, "%s\n", moe_message());
  return (void*)failed;
}

int main(void) {
  moe_world* worlds[kRanks];
  if (moe_world_threads(kRanks, 0, worlds) != MOE_OK) {
    fprintf(stderr, "%s\n", moe_message());
    return 1;
  }
  pthread_t threads[kRanks];
  for (int r = 0; r < kRanks; ++r) {
    if (pthread_create(&threads[r], NULL, RunRank, worlds[r]) != 0) return 1;
  }
  int exit_code = 0;
  for (int r = 0; r < kRanks; ++r) {
    void* result = NULL;
    pthread_join(threads[r], &result);
    if (result != NULL) exit_code = 1;
  }
  return exit_code;
}
