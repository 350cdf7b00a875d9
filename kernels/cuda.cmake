# moe_kernels_cuda: what nvcc makes of the .cu files. Included from the top, after cmake/cuda.cmake.
add_library(moe_kernels_cuda STATIC
  kernels/expert_sort/expert_sort_cuda.cu
  kernels/topk_gate/topk_gate_cuda.cu
  kernels/cross_entropy/cross_entropy_cuda.cu kernels/exact_sum/exact_sum_cuda.cu
  kernels/adamw/adamw_cuda.cu kernels/cast/cast_cuda.cu
  kernels/bias/bias_cuda.cu kernels/combine/combine_cuda.cu kernels/norm/rms_norm_cuda.cu
  kernels/permute/permute_cuda.cu kernels/swiglu/swiglu_cuda.cu
  kernels/attention/rotary_cuda.cu
  kernels/embedding/embedding_cuda.cu
  kernels/attention/attention_cuda.cu
  kernels/grouped_gemm/grouped_gemm_fma_cuda.cu kernels/grouped_gemm/grouped_gemm_mma_cuda.cu)
target_include_directories(moe_kernels_cuda PUBLIC ${PROJECT_SOURCE_DIR})
# Never -lcuda: with the static runtime alone a program starts where no driver is.
target_link_libraries(moe_kernels_cuda PUBLIC CUDA::cudart_static)
target_compile_definitions(moe_kernels_cuda PRIVATE NDEBUG) # an assertion costs registers
target_compile_options(moe_kernels_cuda PRIVATE
  --fmad=false  # numerics contract: a * b + c is two roundings unless the code says fma
  --expt-relaxed-constexpr  # std::bit_cast in device code
  -Xcompiler=-ffp-contract=off,-Wall
  -Xptxas=-v
  $<$<BOOL:${MOE_WARNINGS_AS_ERRORS}>:-Werror=all-warnings>)
# What ptxas says of each kernel (registers, shared memory, spills), kept beside the objects.
set(MOE_PTXAS_LOGS ${PROJECT_BINARY_DIR}/ptxas)
set_target_properties(moe_kernels_cuda PROPERTIES CUDA_COMPILER_LAUNCHER
  "${PROJECT_SOURCE_DIR}/cmake/ptxas_log.sh;${MOE_PTXAS_LOGS};${CMAKE_CXX_COMPILER_LAUNCHER}")

# PTX of the kernels that cuda_instructions.tsv names, for the oldest GPU: what cmake/ptx_check.py reads.
add_library(moe_kernels_ptx OBJECT kernels/combine/combine_cuda.cu
  kernels/grouped_gemm/grouped_gemm_mma_cuda.cu kernels/permute/permute_cuda.cu)
set_target_properties(moe_kernels_ptx PROPERTIES CUDA_PTX_COMPILATION ON CUDA_ARCHITECTURES 80-virtual)
target_include_directories(moe_kernels_ptx PRIVATE ${PROJECT_SOURCE_DIR})
target_compile_definitions(moe_kernels_ptx PRIVATE
  $<TARGET_PROPERTY:moe_kernels_cuda,COMPILE_DEFINITIONS>)
target_compile_options(moe_kernels_ptx PRIVATE $<TARGET_PROPERTY:moe_kernels_cuda,COMPILE_OPTIONS>)
