/* moe/c/moe.h, from C: what a program does with a trainer of its own, and what it is told.
 *   c_api_test FOLDER   one rank; FOLDER: for files
 *   c_api_test          under mpiexec, where this build has MPI: a world of the program's own;
 *                       where it has simulated CUDA devices: a stream, memory and NCCL of its own */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "moe/c/moe.h"

#ifdef MOE_TEST_MPI
#include <mpi.h>
#endif
#ifdef MOE_TEST_CUDA
#include <cuda_runtime_api.h>
#endif

#define CHECK(condition)                                                                 \
  do {                                                                                   \
    if (!(condition)) {                                                                  \
      fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #condition, moe_message()); \
      exit(1);                                                                           \
    }                                                                                    \
  } while (0)
#define CHECK_OK(call) CHECK((call) == MOE_OK)
#define CHECK_REFUSED(call, code, part) \
  CHECK((call) == (code) && strstr(moe_message(), (part)) != NULL)

enum { kTokens = 8, kHidden = 4, kElements = kTokens * kHidden, kLargest = 1024 };

static const double kLargestNorm = 0.05;
static const moe_layer_config kLayer = {
    .num_experts = 4, .hidden_size = kHidden, .ffn_hidden_size = 6, .aux_loss_coeff = 0.01f};

static void Fill(float* x) {
  for (int i = 0; i < kElements; ++i) x[i] = sinf((float)(i * i));
}

/* Half the mean square of y + x; dy its gradient. */
static double Loss(const float* x, const float* y, float* dy) {
  double loss = 0;
  for (int i = 0; i < kElements; ++i) {
    dy[i] = (y[i] + x[i]) / kElements;
    loss += 0.5 * dy[i] * (y[i] + x[i]);
  }
  return loss;
}

/* Descent by the signs of the gradients, in memory of the program's own. */
static void TrainsWithAnOptimiserOfItsOwn(void) {
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  const moe_trainer_options options = {.seed = 1};
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK_OK(moe_layer_create(trainer, "mlp.", &kLayer, &layer));
  const int64_t parameters = moe_parameter_count(trainer);
  CHECK(parameters == 1 + 2 * 4);
  float* memory[1 + 2 * 4];
  for (int64_t p = 0; p < parameters; ++p) {
    moe_parameter parameter;
    CHECK_OK(moe_parameter_at(trainer, p, &parameter));
    CHECK(strncmp(parameter.name, "mlp.", 4) == 0 && parameter.trained);
    CHECK(parameter.rows * parameter.cols <= kLargest);
    memory[p] = malloc(kLargest * sizeof(float));
    CHECK_OK(moe_read(trainer, p, memory[p]));
    CHECK(memcmp(memory[p], parameter.master, sizeof(float)) == 0);
    CHECK_OK(moe_adopt(trainer, p, memory[p]));
  }
  float x[kElements], y[kElements], dy[kElements], dx[kElements], gradient[kLargest];
  Fill(x);
  CHECK_REFUSED(moe_forward(layer, x, kTokens, y), MOE_FAILED_PRECONDITION, "BeginRound");
  double first = 0, last = 0;
  for (int step = 0; step < 300; ++step) {
    int64_t micro_batch = -1;
    CHECK(moe_rounds(trainer) == 1);
    CHECK_OK(moe_begin_round(trainer, &micro_batch));
    CHECK(micro_batch == 0);
    CHECK_REFUSED(moe_forward(layer, x, kTokens, x), MOE_INVALID_ARGUMENT, "in the memory of x");
    CHECK_REFUSED(moe_forward(layer, NULL, kTokens, y), MOE_INVALID_ARGUMENT, "x [8, 4] is null");
    CHECK_OK(moe_forward(layer, x, kTokens, y));
    CHECK(moe_router_loss(layer) > 0);
    last = Loss(x, y, dy);
    if (step == 0) first = last;
    CHECK_REFUSED(moe_backward(layer, dy, x), MOE_INVALID_ARGUMENT, "dx is in the memory of x");
    CHECK_REFUSED(moe_backward(layer, dy, NULL), MOE_INVALID_ARGUMENT, "dx [8, 4] is null");
    CHECK_OK(moe_backward(layer, dy, dx));
    CHECK_REFUSED(moe_gradient(trainer, 0, gradient), MOE_FAILED_PRECONDITION, "Reduce");
    CHECK_REFUSED(moe_clip_grad_norm(trainer, 1, NULL), MOE_FAILED_PRECONDITION, "Reduce");
    CHECK_OK(moe_reduce(trainer));
    CHECK_REFUSED(moe_clip_grad_norm(trainer, -1, NULL), MOE_INVALID_ARGUMENT, "a norm of -1");
    double norm = 0, squares = 0;
    CHECK_OK(moe_clip_grad_norm(trainer, kLargestNorm, &norm));
    for (int64_t p = 0; p < parameters; ++p) {
      moe_parameter parameter;
      CHECK_OK(moe_parameter_at(trainer, p, &parameter));
      CHECK(parameter.master == memory[p]);
      CHECK_OK(moe_gradient(trainer, p, gradient));
      for (int64_t i = 0; i < parameter.rows * parameter.cols; ++i) {
        memory[p][i] -= gradient[i] > 0 ? 0.005f : -0.005f;
        squares += (double)gradient[i] * gradient[i];
      }
    }
    const double clipped = norm < kLargestNorm ? norm : kLargestNorm;
    CHECK(fabs(sqrt(squares) - clipped) < 1e-6 * clipped);
    CHECK_OK(moe_end_step(trainer));
  }
  printf("loss %.4f -> %.4f\n", first, last);
  CHECK(last < 0.5 * first);
  moe_trainer_free(trainer);
  for (int64_t p = 0; p < parameters; ++p) free(memory[p]);
}

/* Infinity times what AdamW moves: known when the step has moved the weights. */
static void TellsOfWeightsThatAreNotFinite(void) {
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  const moe_trainer_options options = {.seed = 1};
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK_OK(moe_layer_create(trainer, "mlp.", &kLayer, &layer));
  float x[kElements], y[kElements], dy[kElements], dx[kElements];
  Fill(x);
  CHECK_OK(moe_begin_round(trainer, NULL));
  CHECK_OK(moe_forward(layer, x, kTokens, y));
  Loss(x, y, dy);
  CHECK_OK(moe_backward(layer, dy, dx));
  CHECK_REFUSED(moe_step(trainer, INFINITY, NULL), MOE_DATA_LOSS,
                "not finite, the first in tensor");
  moe_trainer_free(trainer);
}

/* Two micro-batches of one step, the same tokens: alone, and among rows of padding. */
static void PaddingChangesNoBit(void) {
  enum { kRows = kTokens + 3 };
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  const moe_trainer_options options = {.seed = 1, .micro_batches = 2};
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK_OK(moe_layer_create(trainer, "mlp.", &kLayer, &layer));
  float x[kElements], y[kElements], dy[kElements], dx[kElements];
  Fill(x);
  CHECK_OK(moe_begin_round(trainer, NULL));
  CHECK_OK(moe_forward(layer, x, kTokens, y));
  const double router_loss = moe_router_loss(layer);
  Loss(x, y, dy);
  CHECK_OK(moe_backward(layer, dy, dx));

  const uint8_t padding[kRows] = {1, 0, 0, 0, 255, 0, 0, 0, 0, 0, 1};
  float rows[kRows * kHidden], out[kRows * kHidden];
  for (int r = 0, t = 0; r < kRows; ++r) {
    for (int h = 0; h < kHidden; ++h) rows[r * kHidden + h] = padding[r] ? NAN : x[t * kHidden + h];
    t += padding[r] == 0;
  }
  CHECK_OK(moe_begin_round(trainer, NULL));
  CHECK_OK(moe_forward_padded(layer, rows, kRows, padding, out));
  CHECK(moe_router_loss(layer) == router_loss);
  float d_rows[kRows * kHidden];
  for (int r = 0, t = 0; r < kRows; ++r) {
    for (int h = 0; h < kHidden; ++h) {
      CHECK(out[r * kHidden + h] == (padding[r] ? 0 : y[t * kHidden + h]));
      d_rows[r * kHidden + h] = padding[r] ? NAN : dy[t * kHidden + h];
    }
    t += padding[r] == 0;
  }
  CHECK_OK(moe_backward(layer, d_rows, out));
  for (int r = 0, t = 0; r < kRows; ++r) {
    for (int h = 0; h < kHidden; ++h) {
      CHECK(out[r * kHidden + h] == (padding[r] ? 0 : dx[t * kHidden + h]));
    }
    t += padding[r] == 0;
  }
  CHECK_OK(moe_step(trainer, 0.01, NULL));
  moe_trainer_free(trainer);
}

static void SaysWhatItRefuses(void) {
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  moe_trainer_options options = {.expert_parallel_size = 2};
  CHECK_REFUSED(moe_trainer_create(&options, NULL, &trainer), MOE_INVALID_ARGUMENT, "divisor");
  options.expert_parallel_size = 0;
  options.dtype = MOE_FLOAT16 + 1;
  CHECK_REFUSED(moe_trainer_create(&options, NULL, &trainer), MOE_INVALID_ARGUMENT, "dtype 3");
  options.dtype = MOE_FLOAT32;
  options.bf16_order = MOE_BF16_TILE + 1;
  CHECK_REFUSED(moe_trainer_create(&options, NULL, &trainer), MOE_INVALID_ARGUMENT, "bf16_order 3");
  options.bf16_order = MOE_BF16_TILE;
  CHECK_REFUSED(moe_trainer_create(&options, NULL, &trainer), MOE_INVALID_ARGUMENT,
                "--bf16-order is tile with --dtype f32, expected auto");
  options.bf16_order = MOE_BF16_AUTO;
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK(moe_trainer_bf16_order(trainer) == MOE_BF16_AUTO);
  moe_layer_config config = kLayer;
  config.top_k = 5;
  CHECK_REFUSED(moe_layer_create(trainer, "", &config, &layer), MOE_INVALID_ARGUMENT, "top_k");
  moe_parameter parameter;
  CHECK_REFUSED(moe_parameter_at(trainer, 99, &parameter), MOE_INVALID_ARGUMENT, "parameter 99");
  moe_trainer_free(trainer);
  moe_trainer_free(NULL);
  char id[MOE_NCCL_ID_BYTES] = {0};
  moe_world* worlds[1];
  CHECK(moe_world_nccl(id, 1, 1, 0, 0, worlds) != MOE_OK); /* no NCCL, or no such rank */
  CHECK_REFUSED(moe_world_threads(0, 0, worlds), MOE_INVALID_ARGUMENT, "0 ranks");
  CHECK_OK(moe_world_threads(1, 0, worlds));
  CHECK(moe_world_rank(worlds[0]) == 0 && moe_world_size(worlds[0]) == 1);
  moe_world_free(worlds[0]);
}

/* A Mixtral of one layer, all of whose weights are 0.5. */
static void WriteModel(const char* folder, char* path, size_t size) {
  static const char* const kNames[] = {"gate",         "experts.0.w1", "experts.0.w3",
                                       "experts.0.w2", "experts.1.w1", "experts.1.w3",
                                       "experts.1.w2"};
  snprintf(path, size, "%s/config.json", folder);
  FILE* file = fopen(path, "wb");
  CHECK(file != NULL);
  fputs(
      "{\"model_type\": \"mixtral\", \"hidden_size\": 4, \"intermediate_size\": 6, "
      "\"num_hidden_layers\": 1, \"num_local_experts\": 2, \"num_experts_per_tok\": 1}",
      file);
  fclose(file);
  char header[2048] = "{";
  int64_t bytes = 0;
  for (int n = 0; n < 7; ++n) {
    const int rows = n == 0 ? 2 : n % 3 == 0 ? 4 : 6, cols = n > 0 && n % 3 == 0 ? 6 : 4;
    const size_t at = strlen(header);
    snprintf(header + at, sizeof header - at,
             "%s\"model.layers.0.block_sparse_moe.%s.weight\": {\"dtype\": \"F32\", \"shape\": "
             "[%d, %d], \"data_offsets\": [%d, %d]}",
             n > 0 ? ", " : "", kNames[n], rows, cols, (int)bytes, (int)(bytes + rows * cols * 4));
    bytes += rows * cols * 4;
  }
  strcat(header, "}");
  snprintf(path, size, "%s/model.safetensors", folder);
  file = fopen(path, "wb");
  CHECK(file != NULL);
  const uint64_t length = strlen(header);
  fwrite(&length, sizeof length, 1, file);
  fwrite(header, 1, length, file);
  const float half = 0.5f;
  for (int64_t i = 0; i < bytes; i += 4) fwrite(&half, sizeof half, 1, file);
  fclose(file);
}

/* For inference, without float32 of the weights. */
static void RunsALoadedLayerIn16Bits(const char* folder) {
  char path[4096];
  WriteModel(folder, path, sizeof path);
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  const moe_trainer_options options = {.dtype = MOE_BFLOAT16};
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK_REFUSED(moe_layer_load(trainer, "", "/none", -1, MOE_FREEZE_ALL, &layer), MOE_NOT_FOUND,
                "/none");
  CHECK_OK(moe_layer_load(trainer, "", folder, -1, MOE_FREEZE_ALL, &layer));
  moe_parameter parameter;
  float values[kLargest];
  for (int64_t p = 0; p < moe_parameter_count(trainer); ++p) {
    CHECK_OK(moe_parameter_at(trainer, p, &parameter));
    CHECK(parameter.master == NULL && !parameter.trained);
    CHECK_OK(moe_read(trainer, p, values));
    CHECK(values[0] == 0.5f && values[parameter.rows * parameter.cols - 1] == 0.5f);
  }
  /* Bfloat16 is the upper half of float. x = 1: gate = up = 2, silu(2) * 2, six of them halved. */
  uint16_t x[kHidden] = {0x3f80, 0x3f80, 0x3f80, 0x3f80}, y[kHidden];
  CHECK_OK(moe_begin_evaluation(trainer, 1));
  CHECK_OK(moe_begin_round(trainer, NULL));
  CHECK_OK(moe_forward(layer, x, 1, y));
  CHECK_OK(moe_end_step(trainer));
  const uint32_t bits = (uint32_t)y[0] << 16;
  float result = 0;
  memcpy(&result, &bits, sizeof result);
  const double expected = 6 * 0.5 * 2 * 2 / (1 + exp(-2));
  CHECK(fabs(result - expected) < 0.02 * expected);
  moe_trainer_free(trainer);
}

/* The order that was chosen, or the one that ranks agree on, which a run that goes on gives. */
static void TellsTheOrderOfBFloat16(void) {
  for (moe_bf16_order given = MOE_BF16_AUTO; given <= MOE_BF16_TILE; ++given) {
    moe_trainer* trainer = NULL;
    const moe_trainer_options options = {.dtype = MOE_BFLOAT16, .bf16_order = given};
    CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
    const moe_bf16_order order = moe_trainer_bf16_order(trainer);
    CHECK(given == MOE_BF16_AUTO ? order == MOE_BF16_DOT || order == MOE_BF16_TILE
                                 : order == given);
    moe_trainer_free(trainer);
  }
}

/* What layers read of a master that the program has changed. */
static void ReadsWhatIsRefreshed(void) {
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  const moe_trainer_options options = {.dtype = MOE_BFLOAT16};
  CHECK_OK(moe_trainer_create(&options, NULL, &trainer));
  CHECK_OK(moe_layer_create(trainer, "", &kLayer, &layer));
  uint16_t x[kHidden] = {0x3f80, 0x3f80, 0x3f80, 0x3f80}, before[kHidden], y[kHidden];
  CHECK_OK(moe_begin_evaluation(trainer, 1));
  CHECK_OK(moe_begin_round(trainer, NULL));
  CHECK_OK(moe_forward(layer, x, 1, before));
  for (int64_t p = 0; p < moe_parameter_count(trainer); ++p) {
    moe_parameter parameter;
    CHECK_OK(moe_parameter_at(trainer, p, &parameter));
    if (strstr(parameter.name, "down_proj") == NULL) continue;
    for (int64_t i = 0; i < parameter.rows * parameter.cols; ++i) parameter.master[i] *= -1;
    CHECK_OK(moe_forward(layer, x, 1, y));
    CHECK(memcmp(y, before, sizeof y) == 0);
  }
  for (int64_t p = 0; p < moe_parameter_count(trainer); ++p) CHECK_OK(moe_refresh(trainer, p));
  CHECK_OK(moe_forward(layer, x, 1, y));
  for (int i = 0; i < kHidden; ++i) CHECK(y[i] == (before[i] ^ 0x8000));
  CHECK_OK(moe_end_step(trainer));
  moe_trainer_free(trainer);
}

#ifdef MOE_TEST_CUDA
/* The device's memory and its stream are the program's; the weights' signs turn in the stream. */
static void TrainsOnTheProgramsDevice(void) {
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  moe_trainer_options options = {.cuda_stream = cudaStreamLegacy};
  CHECK_REFUSED(moe_trainer_create(&options, NULL, &trainer), MOE_INVALID_ARGUMENT, "default");
  cudaStream_t stream = NULL;
  float *device_x = NULL, *device_y = NULL, *device_gradient = NULL;
  CHECK(cudaSetDevice(1) == cudaSuccess);
  CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess);
  const size_t bytes = kElements * sizeof(float);
  CHECK(cudaMalloc((void**)&device_x, bytes) == cudaSuccess);
  CHECK(cudaMalloc((void**)&device_y, bytes) == cudaSuccess);
  CHECK(cudaMalloc((void**)&device_gradient, kLargest * sizeof(float)) == cudaSuccess);
  char id[MOE_NCCL_ID_BYTES];
  moe_world* world = NULL;
  CHECK_OK(moe_nccl_id(id));
  CHECK_OK(moe_world_nccl(id, 0, 1, 1, 0, &world));
  options.cuda_stream = stream;
  CHECK_OK(moe_trainer_create(&options, world, &trainer));
  CHECK_OK(moe_layer_create(trainer, "mlp.", &kLayer, &layer));
  float x[kElements], y[kElements], dy[kElements], values[kLargest];
  Fill(x);
  CHECK_REFUSED(moe_adopt(trainer, 0, values), MOE_UNIMPLEMENTED, "CUDA");
  double first = 0, last = 0;
  for (int step = 0; step < 20; ++step) {
    CHECK_OK(moe_begin_round(trainer, NULL));
    CHECK(cudaMemcpyAsync(device_x, x, bytes, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK_OK(moe_forward(layer, device_x, kTokens, device_y));
    CHECK(cudaMemcpyAsync(y, device_y, bytes, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK(cudaStreamSynchronize(stream) == cudaSuccess);
    last = Loss(x, y, dy);
    if (step == 0) first = last;
    CHECK(cudaMemcpyAsync(device_y, dy, bytes, cudaMemcpyDefault, stream) == cudaSuccess);
    CHECK_OK(moe_backward(layer, device_y, device_y));
    if (step % 2 == 0) {
      CHECK_OK(moe_step(trainer, 0.02, NULL));
      continue;
    }
    CHECK_OK(moe_reduce(trainer));
    double norm = 0, squares = 0;
    CHECK_OK(moe_clip_grad_norm(trainer, INFINITY, &norm));
    for (int64_t p = 0; p < moe_parameter_count(trainer); ++p) {
      moe_parameter parameter;
      float gradient[kLargest];
      CHECK_OK(moe_parameter_at(trainer, p, &parameter));
      const int64_t size = parameter.rows * parameter.cols;
      CHECK_OK(moe_gradient(trainer, p, device_gradient));
      CHECK(cudaMemcpyAsync(gradient, device_gradient, size * sizeof(float), cudaMemcpyDefault,
                            stream) == cudaSuccess);
      CHECK_OK(moe_read(trainer, p, values));
      for (int64_t i = 0; i < size; ++i) {
        squares += (double)gradient[i] * gradient[i];
        values[i] -= gradient[i] > 0 ? 0.005f : -0.005f;
      }
      CHECK_OK(moe_write(trainer, p, values));
    }
    CHECK(fabs(sqrt(squares) - norm) < 1e-6 * norm);
    CHECK_OK(moe_end_step(trainer));
  }
  printf("on a device: loss %.4f -> %.4f\n", first, last);
  CHECK(last < 0.9 * first);
  moe_trainer_free(trainer);
  CHECK(cudaFree(device_x) == cudaSuccess && cudaFree(device_y) == cudaSuccess);
  CHECK(cudaFree(device_gradient) == cudaSuccess && cudaStreamDestroy(stream) == cudaSuccess);
}
#endif

#ifdef MOE_TEST_MPI
/* Every second process alone, the others together. */
static void TrainsOverTheProgramsMpi(void) {
  int level = 0, rank = 0;
  moe_world* world = NULL;
  CHECK_REFUSED(moe_world_mpi(0, 0, &world), MOE_FAILED_PRECONDITION, "not initialised");
  MPI_Init_thread(NULL, NULL, MPI_THREAD_MULTIPLE, &level);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm part;
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, rank, &part);
  CHECK_OK(moe_world_mpi(MPI_Comm_c2f(part), 30, &world));
  const moe_trainer_options options = {.expert_parallel_size = moe_world_size(world)};
  moe_trainer* trainer = NULL;
  moe_layer* layer = NULL;
  CHECK_OK(moe_trainer_create(&options, world, &trainer));
  CHECK_OK(moe_layer_create(trainer, "", &kLayer, &layer));
  float x[kElements], y[kElements], dy[kElements], dx[kElements];
  Fill(x);
  double first = 0, last = 0, norm = 0;
  for (int step = 0; step < 50; ++step) {
    CHECK_OK(moe_begin_round(trainer, NULL));
    CHECK_OK(moe_forward(layer, x, kTokens, y));
    last = Loss(x, y, dy);
    if (step == 0) first = last;
    CHECK_OK(moe_backward(layer, dy, dx));
    CHECK_OK(moe_step(trainer, 0.01, &norm));
    CHECK(norm > 0);
  }
  CHECK(last < first);
  moe_trainer_free(trainer);
  MPI_Comm_free(&part);
  MPI_Finalize();
}
#endif

int main(int argc, char** argv) {
  if (argc > 1) {
    TrainsWithAnOptimiserOfItsOwn();
    TellsOfWeightsThatAreNotFinite();
    SaysWhatItRefuses();
    PaddingChangesNoBit();
    RunsALoadedLayerIn16Bits(argv[1]);
    TellsTheOrderOfBFloat16();
    ReadsWhatIsRefreshed();
    return 0;
  }
#ifdef MOE_TEST_MPI
  TrainsOverTheProgramsMpi();
#endif
#ifdef MOE_TEST_CUDA
  TrainsOnTheProgramsDevice();
#endif
  return 0;
}
