# Options, and moe_flags: the compile flags of every target of this project.
include(GNUInstallDirs)
include(CMakeDependentOption)
if(NOT CMAKE_CXX_STANDARD)
  set(CMAKE_CXX_STANDARD 20)
endif()
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)

option(MOE_BUILD_PROGRAMS "Build the program moe and the benchmarks" ${PROJECT_IS_TOP_LEVEL})
cmake_dependent_option(MOE_BUILD_TESTS "Build tests and examples, with the programs"
  ${PROJECT_IS_TOP_LEVEL} MOE_BUILD_PROGRAMS OFF)
option(MOE_INSTALL "Have install rules" ${PROJECT_IS_TOP_LEVEL})
set(MOE_SHARED ${BUILD_SHARED_LIBS}) # moe::moe is libmoe.so
set(BUILD_SHARED_LIBS OFF) # its layers are archives in either case (cmake/install.cmake)
option(MOE_WARNINGS_AS_ERRORS "Treat warnings as errors: for those who change moe" OFF)
option(MOE_MERGE_SOURCES "Compile the sources of a library together, up to eight at a time" OFF)
option(MOE_MERGE_TESTS "Compile the sources of a test program together, up to four at a time" ${MOE_MERGE_SOURCES})
# A surrounding project chooses what it wants: nothing is enabled because a machine has it.
set(moe_found_or_asked OFF)
if(PROJECT_IS_TOP_LEVEL)
  set(moe_found_or_asked AUTO)
endif()
set(MOE_ENABLE_MPI ${moe_found_or_asked} CACHE STRING "MPI backend: AUTO, ON or OFF")
set(MOE_ENABLE_CUDA ${moe_found_or_asked} CACHE STRING "CUDA devices, kernels compiled by nvcc: AUTO, ON or OFF; \
SIMULATED: the same on a CPU, for tests")
set(MOE_ENABLE_NCCL ${moe_found_or_asked} CACHE STRING "NCCL backend, where CUDA devices are: AUTO, ON or OFF")
set(MOE_ENABLE_MPI_VALUES AUTO ON OFF)
set(MOE_ENABLE_CUDA_VALUES AUTO ON OFF SIMULATED)
set(MOE_ENABLE_NCCL_VALUES AUTO ON OFF)
set(MOE_ENABLE_TORCH AUTO CACHE STRING "Tests with LibTorch, of <moe/torch.h>: AUTO, ON or OFF")
set(MOE_ENABLE_TORCH_VALUES AUTO ON OFF)
set(MOE_ENABLE_BENCHMARK AUTO CACHE STRING "kernel_bench, on Google Benchmark: AUTO, ON or OFF")
set(MOE_ENABLE_BENCHMARK_VALUES AUTO ON OFF)
foreach(option MOE_ENABLE_MPI MOE_ENABLE_CUDA MOE_ENABLE_NCCL MOE_ENABLE_TORCH MOE_ENABLE_BENCHMARK)
  set_property(CACHE ${option} PROPERTY STRINGS ${${option}_VALUES})
  if(NOT "${${option}}" IN_LIST ${option}_VALUES)
    list(JOIN ${option}_VALUES ", " expected)
    message(FATAL_ERROR "${option} is '${${option}}', expected one of ${expected}")
  endif()
endforeach()
set(MOE_MPI openmpi CACHE STRING "Which MPI to link: openmpi or mpich")
set(MOE_SANITIZE "" CACHE STRING "-fsanitize= value: address,undefined or thread")

if(PROJECT_IS_TOP_LEVEL) # else the surrounding project chooses
  set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
  find_program(CCACHE_PROGRAM ccache)
  if(CCACHE_PROGRAM AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
    # Build folders and checkouts share objects: the key contains none of their paths. ccache
    # requires the sloppiness to store objects of sources that read a precompiled header.
    set(CMAKE_CXX_COMPILER_LAUNCHER env CCACHE_BASEDIR=${PROJECT_SOURCE_DIR} CCACHE_NOHASHDIR=1
      CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
  endif()
  find_program(LLD_PROGRAM ld.lld)
  if(LLD_PROGRAM)
    add_link_options(-fuse-ld=lld)
    if(NOT MOE_SANITIZE)
      add_link_options(-Wl,--gc-sections) # half of a test program's code is never called
    endif()
  endif()
endif()

add_library(moe_flags INTERFACE)
target_compile_features(moe_flags INTERFACE cxx_std_20)
target_include_directories(moe_flags INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/moe-1>)

# Flags for this project's own files alone; a user's code keeps its own choices.
add_library(moe_own_flags INTERFACE)
target_compile_options(moe_own_flags INTERFACE
  -ffp-contract=off  # numerics contract: a * b + c is two roundings unless the code says fma
  -fexceptions  # whatever the surrounding project chose: exceptions are caught where they arise
  $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>  # GCC's note on 64-byte alignment
  # __FILE__ from the root of the tree, also in merged sources: a message names no folder of who built,
  # and checkouts share objects
  $<$<COMPILE_LANGUAGE:C,CXX>:-fmacro-prefix-map=${PROJECT_SOURCE_DIR}/=>
  $<$<CONFIG:RelWithDebInfo>:-g1>  # file and line; SIMD sources compile in two thirds of the time
  -Wall -Wextra -Wconversion -Wno-sign-conversion -Wno-missing-field-initializers
  # names of two merged sources may shadow each other
  $<$<NOT:$<BOOL:$<TARGET_PROPERTY:UNITY_BUILD>>>:-Wshadow>
  $<IF:$<BOOL:${MOE_WARNINGS_AS_ERRORS}>,-Werror,-Wno-error>)
target_link_libraries(moe_own_flags INTERFACE moe_flags)
if(NOT CMAKE_CXX_FLAGS MATCHES "-O")
  target_compile_options(moe_own_flags INTERFACE $<$<CONFIG:>:-O2>) # without CMAKE_BUILD_TYPE
endif()
if(MOE_SANITIZE)
  # -g1: file and line in a report, and a third less time to compile and link. GCC's documentation
  # says that -Wmaybe-uninitialized is unreliable under sanitizers; builds without them have it.
  target_compile_options(moe_own_flags INTERFACE -fno-omit-frame-pointer -g1
    $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(moe_own_flags INTERFACE -fsanitize=${MOE_SANITIZE})
endif()

# For the libraries.
add_library(moe_private_flags INTERFACE)
target_link_libraries(moe_private_flags INTERFACE moe_own_flags)
# For the programs: nearly all of their run time is spent in the libraries, and this saves a third
# of their compile time.
add_library(moe_program_flags INTERFACE)
target_compile_options(moe_program_flags INTERFACE $<$<CONFIG:RelWithDebInfo>:-O1>)
target_link_libraries(moe_program_flags INTERFACE moe_own_flags)
# The same for test programs.
add_library(moe_test_flags INTERFACE)
target_compile_options(moe_test_flags INTERFACE $<$<CONFIG:RelWithDebInfo>:-O1>)
target_link_libraries(moe_test_flags INTERFACE moe_own_flags)
if(MOE_SANITIZE MATCHES "undefined")
  # AddressSanitizer reports a null pointer when it is read; the check before each call only costs
  # time. Test programs are not checked for undefined behaviour, only the code that they test.
  set(checks -fsanitize=${MOE_SANITIZE} -fno-sanitize-recover=undefined -fno-sanitize=null,vptr)
  target_compile_options(moe_private_flags INTERFACE ${checks} -O1)
  target_compile_options(moe_program_flags INTERFACE ${checks} -O0)
  target_compile_options(moe_test_flags INTERFACE -fsanitize=address -O0)
elseif(MOE_SANITIZE)
  foreach(flags moe_private_flags moe_program_flags moe_test_flags)
    target_compile_options(${flags} INTERFACE -fsanitize=${MOE_SANITIZE} -O1)
  endforeach()
endif()
