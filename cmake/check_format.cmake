# Fails when clang-format would change a source file. Prints SKIPPED without clang-format 14: other
# versions lay out a few constructs differently.
# Run: cmake -DROOT=<source tree> -P check_format.cmake
find_program(CLANG_FORMAT NAMES clang-format-14 clang-format)
if(CLANG_FORMAT)
  execute_process(COMMAND ${CLANG_FORMAT} --version OUTPUT_VARIABLE version)
endif()
if(NOT CLANG_FORMAT OR NOT version MATCHES "version 14\\.")
  message(STATUS "SKIPPED: clang-format 14 was not found")
  return()
endif()
set(files "")
foreach(folder kernels comm gating dispatch moe benchmarks examples tests)
  file(GLOB_RECURSE found ${ROOT}/${folder}/*.h ${ROOT}/${folder}/*.cc ${ROOT}/${folder}/*.cu
    ${ROOT}/${folder}/*.cuh)
  list(APPEND files ${found})
endforeach()
execute_process(COMMAND ${CLANG_FORMAT} --dry-run -Werror ${files} RESULT_VARIABLE rc)
if(NOT rc EQUAL 0)
  message(FATAL_ERROR "clang-format: run scripts/lint.sh --fix")
endif()
