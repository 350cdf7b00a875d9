# Settings that shorten a build. Included last, when all targets are known.
#
# Merged sources: up to eight sources of a library (MOE_MERGE_SOURCES) and up to four of a test program
# (MOE_MERGE_TESTS) are compiled as one, in a third of the time. Both are on in presets that build from
# scratch or most often (demo, cpu, asan, tsan), and in all that scripts/test.sh builds. Every source of
# a library must still compile alone, which the other presets and scripts/builds.sh release check.
#
# Precompiled headers: most of the time of a small source goes into reading Abseil and the standard
# library. Three sets (library, parts of programs, tests), compiled once each and used by every target
# that is compiled with the same flags.
#
# Sources include what they use nevertheless: MOE_PRECOMPILED_HEADERS=OFF builds without the sets.
option(MOE_PRECOMPILED_HEADERS "Read Abseil and the standard library once per build" ON)
file(CONFIGURE OUTPUT ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc CONTENT "int main() {}\n")
set(standard_headers <algorithm> <array> <atomic> <cmath> <condition_variable> <cstdint> <functional>
  <limits> <map> <memory> <mutex> <numeric> <optional> <string> <thread> <type_traits> <utility> <vector>
  <absl/container/inlined_vector.h> <absl/functional/function_ref.h> <absl/status/status.h>
  <absl/status/statusor.h> <absl/strings/match.h> <absl/strings/str_cat.h> <absl/strings/str_join.h>
  <absl/strings/string_view.h> <absl/time/clock.h> <absl/time/time.h> <absl/types/span.h>)
set(libraries absl::function_ref absl::inlined_vector absl::status absl::statusor
  absl::strings absl::span absl::time Threads::Threads)
add_library(moe_precompiled_library OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
target_link_libraries(moe_precompiled_library PRIVATE ${libraries} moe_private_flags)
target_precompile_headers(moe_precompiled_library PRIVATE ${standard_headers})
if(MOE_BUILD_PROGRAMS)
  find_package(nlohmann_json REQUIRED)
  add_library(moe_precompiled_program OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
  target_link_libraries(moe_precompiled_program PRIVATE ${libraries} moe_program_flags
    nlohmann_json::nlohmann_json)
  target_precompile_headers(moe_precompiled_program PRIVATE ${standard_headers} <nlohmann/json.hpp>)
endif()
if(MOE_BUILD_TESTS)
  find_package(GTest REQUIRED)
  add_executable(moe_precompiled_test EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
  target_link_libraries(moe_precompiled_test PRIVATE ${libraries} moe_test_flags GTest::gmock)
  target_precompile_headers(moe_precompiled_test PRIVATE ${standard_headers} <gmock/gmock.h>
    <gtest/gtest.h>)
endif()

# Never merged: sources that have the same names in every folder of their kind (commands, help,
# settings, options, families of models), SIMD sources, which include themselves, and the operators
# new and delete of tests, which a source that calls them must not see.
set(apart "_(command|help|settings|options)\\.cc$|family_[a-z0-9_]+\\.cc$|/counting_new\\.cc$")

function(moe_merge_sources target most)
  get_target_property(folder ${target} SOURCE_DIR)
  get_target_property(sources ${target} SOURCES)
  foreach(source ${sources})
    if(source MATCHES "^[$]|\\.cu$")
      continue()
    endif()
    cmake_path(ABSOLUTE_PATH source BASE_DIRECTORY ${folder} OUTPUT_VARIABLE path)
    set(simd "")
    if(path MATCHES "/kernels/")
      file(STRINGS ${path} simd REGEX "foreach_target|[<]immintrin" LIMIT_COUNT 1)
    endif()
    if(simd OR path MATCHES "${apart}")
      set_source_files_properties(${path} TARGET_DIRECTORY ${target} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    endif()
  endforeach()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${most})
  # -Wsubobject-linkage warns about a type without linkage in an included file; here the included
  # files are the project's own sources. -Warray-bounds: GCC 12 folds destructors of
  # absl::InlinedVectors of two sizes and confuses them; presets that merge nothing keep this
  # warning.
  target_compile_options(${target} PRIVATE
    $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage -Wno-array-bounds>)
endfunction()

function(moe_build_fast folder)
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(each ${folders})
    moe_build_fast(${each})
  endforeach()
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    if(target MATCHES "^moe_precompiled_" OR NOT libraries)
      continue()
    endif()
    if(MOE_MERGE_SOURCES AND type STREQUAL STATIC_LIBRARY AND target MATCHES "^moe_")
      moe_merge_sources(${target} 8)
    elseif(MOE_MERGE_TESTS AND moe_test_flags IN_LIST libraries)
      moe_merge_sources(${target} 4)
    endif()
    if(NOT MOE_PRECOMPILED_HEADERS)
      continue()
    elseif(moe_test_flags IN_LIST libraries)
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_test)
    elseif(type STREQUAL STATIC_LIBRARY AND moe_program_flags IN_LIST libraries)
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_program)
    elseif(type MATCHES "^(STATIC_LIBRARY|OBJECT_LIBRARY)$")
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_library)
    endif()
  endforeach()
endfunction()
moe_build_fast(${PROJECT_SOURCE_DIR})
