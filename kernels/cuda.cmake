# moe_kernels_cuda and, for Hopper GPUs alone, moe_kernels_hopper: the objects of the .cu files, which
# moe_kernels takes in. Included from the top, after cmake/cuda.cmake. SIMULATED compiles them for the
# simulator (cmake/cusim.cmake).
set(MOE_CUDA_SOURCES
  expert_capacity/expert_capacity_cuda.cu expert_sort/expert_sort_cuda.cu
  topk_gate/gate_backward_cuda.cu topk_gate/topk_gate_cuda.cu
  cross_entropy/cross_entropy_cuda.cu exact_sum/exact_sum_cuda.cu
  activation/activation_cuda.cu adamw/adamw_cuda.cu
  base/cuda_probe.cu bias/bias_cuda.cu combine/combine_cuda.cu norm/rms_norm_cuda.cu
  permute/permute_cuda.cu
  draw/draw_cuda.cu elementwise/elementwise_cuda.cu row_gate/row_gate_cuda.cu
  attention/rotary_cuda.cu
  embedding/embedding_cuda.cu
  router_loss/router_loss_cuda.cu
  attention/attention_cuda.cu attention/attention_mma_backward_cuda.cu attention/attention_mma_cuda.cu
  grouped_gemm/fold_nodes_cuda.cu grouped_gemm/grouped_gemm_fma_cuda.cu grouped_gemm/grouped_gemm_mma_cuda.cu)
set(MOE_HOPPER_SOURCES
  grouped_gemm/grouped_gemm_wgmma_cuda.cu grouped_gemm/weight_gradient_wgmma_cuda.cu)
if(NOT MOE_CUDA_FOUND AND NOT MOE_CUDA_SIMULATED)
  return()
endif()
list(TRANSFORM MOE_CUDA_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
list(TRANSFORM MOE_HOPPER_SOURCES PREPEND ${CMAKE_CURRENT_LIST_DIR}/)
add_library(moe_kernels_cuda OBJECT ${MOE_CUDA_SOURCES})
add_library(moe_kernels_hopper OBJECT ${MOE_HOPPER_SOURCES})
target_include_directories(moe_kernels_cuda PRIVATE ${RANDOM123_INCLUDE_DIR})
if(MOE_CUDA_SIMULATED)
  set_source_files_properties(${MOE_CUDA_SOURCES} ${MOE_HOPPER_SOURCES} PROPERTIES LANGUAGE CXX)
  target_link_libraries(moe_kernels_cuda PRIVATE cusim moe_private_flags)
  target_link_libraries(moe_kernels_hopper PRIVATE cusim moe_private_flags)
  return()
endif()
set_target_properties(moe_kernels_hopper PROPERTIES CUDA_ARCHITECTURES 90a-real)
# ptxas's report on each kernel (registers, shared memory, spills), kept beside the objects.
set(MOE_PTXAS_LOGS ${PROJECT_BINARY_DIR}/ptxas)
foreach(objects moe_kernels_cuda moe_kernels_hopper)
  # Options that a surrounding project sets for all files are for its C++ compiler: nvcc would take
  # -Werror's value from the next option.
  get_target_property(around ${objects} COMPILE_OPTIONS)
  if(around)
    list(TRANSFORM around PREPEND -Xcompiler= REGEX "^-")
    set_target_properties(${objects} PROPERTIES COMPILE_OPTIONS "${around}")
  endif()
  target_include_directories(${objects} PUBLIC ${PROJECT_SOURCE_DIR})
  # Never -lcuda: with the static runtime alone a program starts without a driver.
  target_link_libraries(${objects} PUBLIC CUDA::cudart_static)
  target_compile_definitions(${objects} PRIVATE NDEBUG) # an assertion costs registers, and wgmma its overlap
  target_compile_options(${objects} PRIVATE
    --fmad=false  # numerics contract: a * b + c is two roundings unless the code says fma
    # A call of a host function: the kernel would be compiled without it.
    --diag-error=20013,20015
    -Xcompiler=-ffp-contract=off,-fexceptions,-Wall
    -Xptxas=-v
    --compress-mode=size  # a tenth of the default's: programs of one GPU hold the code of three
    $<IF:$<BOOL:${MOE_WARNINGS_AS_ERRORS}>,-Werror=all-warnings,-Xcompiler=-Wno-error>)
  set(launcher ${PROJECT_SOURCE_DIR}/cmake/ptxas_log.sh ${MOE_PTXAS_LOGS} ${CMAKE_CXX_COMPILER_LAUNCHER})
  set_target_properties(${objects} PROPERTIES CUDA_COMPILER_LAUNCHER "${launcher}")
endforeach()
