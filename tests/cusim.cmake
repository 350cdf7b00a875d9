# CUDA kernels on the CPU: the simulator of cusim/, its own tests, and the kernels of kernels/ that
# it executes. Needs CUDA's headers and neither nvcc nor a GPU. docs/cuda.md says what this finds.
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  message(STATUS "moe: no simulated CUDA kernels: tests/cusim/fiber.cc switches stacks on x86-64 alone")
  return()
endif()
find_path(MOE_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_HOME
  PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(MOE_CCCL_INCLUDE_DIR cuda/atomic HINTS ${MOE_CUDA_INCLUDE_DIR} PATH_SUFFIXES cccl)
if(NOT MOE_CUDA_INCLUDE_DIR OR NOT MOE_CCCL_INCLUDE_DIR)
  message(STATUS "moe: no simulated CUDA kernels: CUDA's headers were not found. Install CUDA 13 in "
    "/usr/local/cuda, or the wheels nvidia-cuda-runtime and nvidia-cuda-cccl from PyPI, and give "
    "their include folders as MOE_CUDA_INCLUDE_DIR and MOE_CCCL_INCLUDE_DIR")
  return()
endif()

# Not under ThreadSanitizer: the engine is what ThreadSanitizer is told about.
set(cusim_engine cusim/fiber.cc cusim/shared_memory.cc cusim/simulation.cc cusim/synchronization.cc)
add_library(cusim STATIC EXCLUDE_FROM_ALL ${cusim_engine})
target_include_directories(cusim PUBLIC ${CMAKE_CURRENT_SOURCE_DIR})
target_include_directories(cusim SYSTEM PUBLIC ${MOE_CUDA_INCLUDE_DIR} ${MOE_CCCL_INCLUDE_DIR})
target_link_libraries(cusim PUBLIC moe_private_flags)
if(MOE_SANITIZE MATCHES "thread")
  set_source_files_properties(${cusim_engine} PROPERTIES
    COMPILE_OPTIONS -fno-sanitize=thread COMPILE_DEFINITIONS CUSIM_TSAN)
endif()

moe_test(cusim_test LABELS unit cusim threads
  SOURCES cusim/cusim_test.cc cusim/cusim_tensor_test.cc LIBS cusim)
moe_test(cusim_faults_test LABELS unit cusim threads
  SOURCES cusim/cusim_faults_test.cc cusim/cusim_memory_faults_test.cc LIBS cusim)

# The .cu files as the simulator executes them: C++ to the host compiler.
set(cuda_sources "")
foreach(op expert_sort/expert_sort topk_gate/topk_gate
  cross_entropy/cross_entropy exact_sum/exact_sum adamw/adamw cast/cast
  permute/permute combine/combine bias/bias norm/rms_norm swiglu/swiglu attention/rotary embedding/embedding attention/attention
    grouped_gemm/grouped_gemm_fma grouped_gemm/grouped_gemm_mma)
  list(APPEND cuda_sources ${PROJECT_SOURCE_DIR}/kernels/${op}_cuda.cu)
endforeach()
set_source_files_properties(${cuda_sources} PROPERTIES LANGUAGE CXX)
add_library(moe_cuda_simulated STATIC EXCLUDE_FROM_ALL ${cuda_sources})
target_link_libraries(moe_cuda_simulated PUBLIC cusim)
moe_test(cuda_kernels_test LABELS unit cusim threads
  SOURCES topk_gate_cuda_test.cc expert_sort_cuda_test.cc
  permute_cuda_test.cc combine_cuda_test.cc bias_cuda_test.cc rms_norm_cuda_test.cc
  activation_cuda_test.cc rotary_cuda_test.cc embedding_cuda_test.cc
  cross_entropy_cuda_test.cc exact_sum_cuda_test.cc adamw_cuda_test.cc cast_cuda_test.cc
  LIBS moe_cuda_simulated moe_kernels TIMEOUT 300)
moe_test(expert_sort_plan_test LABELS unit cusim
  SOURCES expert_sort_plan_test.cc dispatch_world.cc LIBS moe_cuda_simulated moe_dispatch)
moe_test(attention_cuda_test LABELS unit cusim threads
  SOURCES attention_cuda_test.cc LIBS moe_cuda_simulated moe_kernels TIMEOUT 300)
moe_test(grouped_gemm_cuda_test LABELS unit cusim threads
  SOURCES grouped_gemm_cuda_test.cc LIBS moe_cuda_simulated moe_kernels TIMEOUT 300)
