# Sets MOE_CUDA_FOUND, and nvcc up for .cu files: C++20, cubins for sm_80 and sm_90a, PTX for later
# GPUs. AUTO uses nvcc if it is found, except under sanitizers, which it does not support.
# MOE_CUDA_SIMULATED instead: the host compiler compiles them, and tests/cusim/ replaces runtime and
# device. moe_kernels links MOE_CUDA_RUNTIME in either case.
set(MOE_CUDA_FOUND FALSE)
set(MOE_CUDA_SIMULATED FALSE)
if(MOE_ENABLE_CUDA STREQUAL "SIMULATED")
  include(cusim)
  if(NOT TARGET cusim)
    message(FATAL_ERROR "MOE_ENABLE_CUDA=SIMULATED: ${MOE_CUSIM_MISSING}")
  endif()
  set(MOE_CUDA_SIMULATED TRUE)
  set(MOE_CUDA_RUNTIME $<BUILD_INTERFACE:cusim_runtime>) # not in a package
  message(STATUS "moe: CUDA devices are simulated on the CPU: for tests, thousands of times slower")
  return()
endif()
if(MOE_ENABLE_CUDA STREQUAL "ON" AND MOE_SANITIZE)
  message(FATAL_ERROR "MOE_ENABLE_CUDA=ON with MOE_SANITIZE=${MOE_SANITIZE}: nvcc has no sanitizers; "
    "the tests labelled cusim execute the kernels under them, without nvcc")
endif()
if(MOE_ENABLE_CUDA MATCHES "^(ON|AUTO)$" AND NOT MOE_SANITIZE)
  find_program(MOE_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME PATHS /usr/local/cuda PATH_SUFFIXES bin)
  if(MOE_NVCC)
    execute_process(COMMAND ${MOE_NVCC} --version OUTPUT_VARIABLE nvcc_says ERROR_QUIET)
    string(REGEX MATCH "release ([0-9.]+)" ignored "${nvcc_says}")
    set(nvcc_version "${CMAKE_MATCH_1}")
  endif()
  if(MOE_NVCC AND nvcc_version VERSION_GREATER_EQUAL 13.0)
    set(MOE_CUDA_FOUND TRUE)
  elseif(MOE_NVCC AND MOE_ENABLE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "CUDA ${nvcc_version} at ${MOE_NVCC}, expected 13.0 or later: give "
      "another with -DMOE_NVCC=<path of nvcc>, or build with MOE_ENABLE_CUDA=OFF")
  elseif(MOE_NVCC)
    message(STATUS "moe: CUDA ${nvcc_version} at ${MOE_NVCC}, expected 13.0 or later: not used")
  elseif(MOE_ENABLE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "MOE_ENABLE_CUDA=ON, but nvcc was not found: install the CUDA toolkit, 13.0 or "
      "later (https://developer.nvidia.com/cuda-downloads), put its bin folder in PATH or give "
      "-DMOE_NVCC=<path of nvcc>; or build with MOE_ENABLE_CUDA=OFF")
  endif()
endif()
message(STATUS "moe: CUDA kernels compiled: ${MOE_CUDA_FOUND}")
if(NOT MOE_CUDA_FOUND)
  return()
endif()

set(CMAKE_CUDA_COMPILER ${MOE_NVCC})
if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES)
  set(CMAKE_CUDA_ARCHITECTURES "80-real;90a-real;90-virtual")
endif()
enable_language(CUDA)
# CMake 3.25.1 does not know that nvcc supports C++20.
if(NOT CMAKE_CUDA20_STANDARD_COMPILE_OPTION)
  set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION "-std=c++20")
  list(APPEND CMAKE_CUDA_COMPILE_FEATURES cuda_std_20)
endif()
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA_STANDARD_REQUIRED ON)
set(CMAKE_CUDA_EXTENSIONS OFF)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static) # so that a program starts without a driver
# In projects that require CMake 3.25, the module of 3.25.1 requests a library that CUDA 13 no
# longer has.
set(moe_required_cmake ${CMAKE_MINIMUM_REQUIRED_VERSION})
set(CMAKE_MINIMUM_REQUIRED_VERSION 3.24)
find_package(CUDAToolkit 13.0 REQUIRED)
set(CMAKE_MINIMUM_REQUIRED_VERSION ${moe_required_cmake})
set(MOE_CUDA_RUNTIME CUDA::cudart_static)
