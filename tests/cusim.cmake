# CUDA kernels on the CPU: the tests of the simulator, and the kernels of kernels/ that it executes.
# Needs CUDA's headers and neither nvcc nor a GPU. docs/cuda.md says what this finds.
include(cusim)
if(NOT TARGET cusim)
  message(STATUS "moe: no simulated CUDA kernels: ${MOE_CUSIM_MISSING}")
  return()
endif()

moe_test(cusim_test LABELS unit cusim threads
  SOURCES cusim/cusim_test.cc cusim/cusim_tensor_test.cc LIBS cusim)
moe_test(cusim_faults_test LABELS unit cusim threads
  SOURCES cusim/cusim_faults_test.cc cusim/cusim_memory_faults_test.cc LIBS cusim)
moe_test(fake_cudart_test LABELS unit cusim threads SOURCES fake_cudart_test.cc LIBS cusim)

# The .cu files as the simulator executes them: C++ to the host compiler. Where moe_kernels has nvcc's
# objects and CUDA's runtime, no second set of both links; the presets without nvcc have these tests.
if(MOE_CUDA_FOUND)
  return()
endif()
if(MOE_CUDA_SIMULATED)
  add_library(moe_cuda_simulated INTERFACE) # moe_kernels has them
  target_link_libraries(moe_cuda_simulated INTERFACE moe_kernels cusim)
  moe_test(cuda_stream_test LABELS unit cusim threads SOURCES cuda_stream_test.cc
    LIBS moe_cuda_simulated)
  if(EXISTS ${MOE_CUDA_INCLUDE_DIR}/cublas_v2.h) # else Cublas is kUnimplemented
    moe_test(gemm_cublas_test LABELS unit cusim threads SOURCES gemm_cublas_test.cc
      LIBS moe_cuda_simulated)
  endif()
else()
  set_source_files_properties(${MOE_CUDA_SOURCES} PROPERTIES LANGUAGE CXX)
  add_library(moe_cuda_simulated STATIC EXCLUDE_FROM_ALL ${MOE_CUDA_SOURCES})
  target_link_libraries(moe_cuda_simulated PUBLIC cusim)
endif()
moe_test(cuda_kernels_test LABELS unit cusim threads
  SOURCES router_loss_cuda_test.cc gate_backward_cuda_test.cc topk_gate_cuda_test.cc expert_sort_cuda_test.cc
  expert_capacity_cuda_test.cc
  permute_cuda_test.cc combine_cuda_test.cc bias_cuda_test.cc rms_norm_cuda_test.cc
  activation_cuda_test.cc rotary_cuda_test.cc embedding_cuda_test.cc
  partial_sum_cuda_test.cc product_cuda_test.cc row_gate_cuda_test.cc
  cross_entropy_cuda_test.cc exact_sum_cuda_test.cc adamw_cuda_test.cc cast_cuda_test.cc
  LIBS moe_cuda_simulated moe_kernels TIMEOUT 600)
moe_test(expert_sort_plan_test LABELS unit cusim
  SOURCES expert_sort_plan_test.cc dispatch_world.cc LIBS moe_cuda_simulated moe_dispatch)
moe_test(attention_cuda_test LABELS unit cusim threads
  SOURCES attention_cuda_test.cc LIBS moe_cuda_simulated moe_kernels TIMEOUT 600)
moe_test(grouped_gemm_cuda_test LABELS unit cusim threads
  SOURCES grouped_gemm_cuda_test.cc LIBS moe_cuda_simulated moe_kernels TIMEOUT 600)

# The backend nccl, its own source, over the fakes of CUDA's runtime and of NCCL.
moe_add_fake_nccl()
if(NOT TARGET cusim_nccl)
  message(STATUS "moe: no tests of the backend nccl: ${nccl_missing}")
  return()
endif()
if(MOE_CUDA_SIMULATED)
  set(moe_nccl_simulated moe_comm_nccl cusim_nccl moe_cuda_simulated)
else()
  # In place of what moe_kernels has without CUDA: objects come before a library's.
  add_library(moe_devices_simulated OBJECT EXCLUDE_FROM_ALL ${MOE_NCCL_SOURCES})
  foreach(source base/buffer_cuda base/cuda_devices base/cuda_staging base/cuda_status base/stream_cuda
      base/stream_timer_cuda partial_sum/partial_sum)
    target_sources(moe_devices_simulated PRIVATE ${PROJECT_SOURCE_DIR}/kernels/${source}.cc)
  endforeach()
  target_compile_definitions(moe_devices_simulated PRIVATE MOE_CUDA MOE_NCCL_LINKED)
  target_link_libraries(moe_devices_simulated PUBLIC moe_comm cusim_nccl absl::inlined_vector OpenSSL::Crypto)
  set(moe_nccl_simulated moe_devices_simulated moe_cuda_simulated moe_comm cusim_nccl)
endif()
moe_test(comm_contract_nccl_test LABELS contract cusim threads
  SOURCES comm_contract_test.cc comm_contract_order_test.cc comm_contract_failure_test.cc comm_env_nccl.cc
  LIBS ${moe_nccl_simulated} TIMEOUT 300)
moe_test(fake_nccl_test LABELS unit cusim threads SOURCES fake_nccl_test.cc LIBS cusim_nccl)
moe_test(nccl_device_test LABELS unit cusim threads SOURCES nccl_device_test.cc nccl_ring_test.cc
  LIBS ${moe_nccl_simulated})
moe_test(nccl_join_test LABELS unit cusim threads SOURCES nccl_join_test.cc LIBS ${moe_nccl_simulated})
moe_test(nccl_store_test LABELS unit cusim threads SOURCES nccl_store_test.cc nccl_store_strangers_test.cc
  LIBS ${moe_nccl_simulated})
moe_test(nccl_fault_test LABELS unit cusim threads SOURCES nccl_fault_test.cc LIBS ${moe_nccl_simulated})
