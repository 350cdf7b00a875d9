# The library cusim: the simulator of CUDA kernels and a replacement of CUDA's runtime, both in
# tests/cusim/. Needs CUDA's headers, but neither nvcc nor a GPU. Without them there is no target,
# and MOE_CUSIM_MISSING names what is missing.
include_guard(GLOBAL)
if(NOT CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(MOE_CUSIM_MISSING "tests/cusim/fiber.cc switches stacks on x86-64 alone")
  return()
endif()
find_path(MOE_CUDA_INCLUDE_DIR cuda_runtime_api.h HINTS ${CUDAToolkit_INCLUDE_DIRS} ENV CUDA_HOME
  PATHS /usr/local/cuda PATH_SUFFIXES include)
find_path(MOE_CCCL_INCLUDE_DIR cuda/atomic HINTS ${MOE_CUDA_INCLUDE_DIR} PATH_SUFFIXES cccl)
if(NOT MOE_CUDA_INCLUDE_DIR OR NOT MOE_CCCL_INCLUDE_DIR)
  set(MOE_CUSIM_MISSING "CUDA's headers were not found. Install CUDA 13 in /usr/local/cuda, or the \
wheels nvidia-cuda-runtime and nvidia-cuda-cccl from PyPI, and give their include folders as \
MOE_CUDA_INCLUDE_DIR and MOE_CCCL_INCLUDE_DIR")
  return()
endif()

set(cusim_dir ${PROJECT_SOURCE_DIR}/tests/cusim)
# Not under ThreadSanitizer: the engine informs ThreadSanitizer of the simulated threads.
set(cusim_engine async_proxy.cc fiber.cc simulation.cc synchronization.cc)
list(TRANSFORM cusim_engine PREPEND ${cusim_dir}/)
add_library(cusim STATIC EXCLUDE_FROM_ALL ${cusim_engine} ${cusim_dir}/fake_cublas.cc
  ${cusim_dir}/fake_cudart.cc ${cusim_dir}/fake_memory.cc ${cusim_dir}/fake_streams.cc
  ${cusim_dir}/multiprocessors.cc)
target_include_directories(cusim PUBLIC ${PROJECT_SOURCE_DIR}/tests)
target_include_directories(cusim SYSTEM PUBLIC ${MOE_CUDA_INCLUDE_DIR} ${MOE_CCCL_INCLUDE_DIR})
target_link_libraries(cusim PUBLIC moe_own_flags PRIVATE moe_private_flags)
# What sources that call CUDA's runtime link. They are compiled as for CUDA's own runtime, to the flag,
# so that ccache has the objects of a build with nvcc.
add_library(cusim_runtime INTERFACE)
target_include_directories(cusim_runtime SYSTEM INTERFACE ${MOE_CUDA_INCLUDE_DIR})
target_link_libraries(cusim_runtime INTERFACE $<LINK_ONLY:cusim>)
if(MOE_SANITIZE MATCHES "thread")
  set_source_files_properties(${cusim_engine} TARGET_DIRECTORY cusim PROPERTIES
    COMPILE_OPTIONS -fno-sanitize=thread COMPILE_DEFINITIONS CUSIM_TSAN SKIP_PRECOMPILE_HEADERS TRUE)
endif()
