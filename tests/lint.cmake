# Checks of the source tree itself, and of the installed package. Sources are read when a test runs,
# so nothing here needs a new configure when a file comes.

function(moe_source_check name)
  add_test(NAME ${name} COMMAND ${CMAKE_COMMAND} -DROOT=${PROJECT_SOURCE_DIR}
    -P ${PROJECT_SOURCE_DIR}/cmake/check_${name}.cmake)
  set_tests_properties(${name} PROPERTIES LABELS lint TIMEOUT 60
    SKIP_REGULAR_EXPRESSION "SKIPPED")
endfunction()

moe_source_check(layering)
moe_source_check(length)
moe_source_check(format)

# The layering check itself: a tree with one wrong include per rule must be refused, and say so.
add_test(NAME layering_refuses COMMAND ${CMAKE_COMMAND} -DSCRATCH=${CMAKE_CURRENT_BINARY_DIR}/layering
  -DCHECK=${PROJECT_SOURCE_DIR}/cmake/check_layering.cmake
  -P ${CMAKE_CURRENT_SOURCE_DIR}/layering_refuses.cmake)
set_tests_properties(layering_refuses PROPERTIES LABELS lint TIMEOUT 30)

# Every header compiles alone, and twice. Built by its test only. One with a guard that its own .cc
# includes first has been compiled so already.
file(GLOB_RECURSE headers RELATIVE ${PROJECT_SOURCE_DIR} CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/kernels/*.h ${PROJECT_SOURCE_DIR}/comm/*.h ${PROJECT_SOURCE_DIR}/gating/*.h
  ${PROJECT_SOURCE_DIR}/dispatch/*.h ${PROJECT_SOURCE_DIR}/moe/*.h
  ${PROJECT_SOURCE_DIR}/benchmarks/*.h ${PROJECT_SOURCE_DIR}/tests/*.h)
list(FILTER headers EXCLUDE REGEX "^tests/consumer/")
list(FILTER headers EXCLUDE REGEX "-inl\\.h$") # Highway: compiled once per target, by its own .cc
if(NOT MOE_MPI_FOUND)
  list(FILTER headers EXCLUDE REGEX "^comm/mpi/")
endif()
if(NOT TARGET cusim) # no CUDA headers
  list(FILTER headers EXCLUDE REGEX "cuda|cusim")
endif()
set(units "")
foreach(header ${headers})
  string(REGEX REPLACE "\\.h$" ".cc" own_source ${PROJECT_SOURCE_DIR}/${header})
  if(EXISTS ${own_source})
    file(STRINGS ${own_source} first_include REGEX "^#include " LIMIT_COUNT 1)
    file(STRINGS ${PROJECT_SOURCE_DIR}/${header} guard REGEX "^#ifndef MOE_[A-Z0-9_]+_H_$" LIMIT_COUNT 1)
    if(guard AND first_include STREQUAL "#include \"${header}\"")
      continue()
    endif()
  endif()
  string(MAKE_C_IDENTIFIER ${header} unit)
  set(unit ${CMAKE_CURRENT_BINARY_DIR}/headers/${unit}.cc)
  file(CONFIGURE OUTPUT ${unit} CONTENT "#include \"${header}\"\n#include \"${header}\"\n")
  list(APPEND units ${unit})
endforeach()
add_library(headers_compile_alone OBJECT EXCLUDE_FROM_ALL ${units})
target_link_libraries(headers_compile_alone PRIVATE moe_private_flags moe_mpi
  absl::status absl::statusor absl::strings absl::span absl::function_ref
  absl::time PkgConfig::HWY TBB::tbb GTest::gmock)
target_compile_options(headers_compile_alone PRIVATE -O0 -g0)
set_target_properties(headers_compile_alone PROPERTIES MOE_NO_PRECOMPILED TRUE)
if(TARGET cusim)
  target_link_libraries(headers_compile_alone PRIVATE cusim)
endif()
target_include_directories(headers_compile_alone PRIVATE ${RANDOM123_INCLUDE_DIR})
add_test(NAME headers_compile_alone
  COMMAND ${CMAKE_COMMAND} --build ${CMAKE_BINARY_DIR} --target headers_compile_alone)
set_tests_properties(headers_compile_alone PROPERTIES LABELS lint TIMEOUT 900 RUN_SERIAL TRUE)

if(MOE_MPI_FOUND)
  add_dependencies(mpi_tests moe run_ranks_main) # beside the programs of moe_test
endif()

# The README's program, build file, commands and links are true.
add_test(NAME readme COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/readme_test.sh ${PROJECT_SOURCE_DIR}
  $<TARGET_FILE_DIR:moe> $<$<BOOL:${MOE_MPI_FOUND}>:${MPIEXEC_EXECUTABLE}>)
set_tests_properties(readme PROPERTIES LABELS lint TIMEOUT 300)

# A user's project against an installed tree.
add_test(NAME consumer COMMAND ${CMAKE_COMMAND} -DBUILD=${CMAKE_BINARY_DIR}
  -DSOURCE=${PROJECT_SOURCE_DIR} -DSCRATCH=${CMAKE_CURRENT_BINARY_DIR}/consumer
  "-DCOMPILER_LAUNCHER=${CMAKE_CXX_COMPILER_LAUNCHER}"
  -P ${CMAKE_CURRENT_SOURCE_DIR}/consumer_test.cmake)
set_tests_properties(consumer PROPERTIES LABELS package TIMEOUT 300 RUN_SERIAL TRUE)
