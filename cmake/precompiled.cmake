# Precompiled headers: most of the time of a small source goes into reading Abseil and the standard
# library. Three sets (library, parts of programs, tests), compiled once each and used by every target
# that is compiled with the same flags. Included last, when all targets are known.
#
# Sources include what they use all the same: MOE_PRECOMPILED_HEADERS=OFF builds without.
option(MOE_PRECOMPILED_HEADERS "Read Abseil and the standard library once per build" ON)
if(NOT MOE_PRECOMPILED_HEADERS)
  return()
endif()

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
find_package(nlohmann_json REQUIRED)
add_library(moe_precompiled_program OBJECT EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
target_link_libraries(moe_precompiled_program PRIVATE ${libraries} moe_program_flags
  nlohmann_json::nlohmann_json)
target_precompile_headers(moe_precompiled_program PRIVATE ${standard_headers} <nlohmann/json.hpp>)
if(MOE_BUILD_TESTS)
  find_package(GTest REQUIRED)
  add_executable(moe_precompiled_test EXCLUDE_FROM_ALL ${CMAKE_CURRENT_BINARY_DIR}/precompiled.cc)
  target_link_libraries(moe_precompiled_test PRIVATE ${libraries} moe_test_flags GTest::gmock)
  target_precompile_headers(moe_precompiled_test PRIVATE ${standard_headers} <gmock/gmock.h>
    <gtest/gtest.h>)
endif()

function(moe_use_precompiled folder)
  get_property(folders DIRECTORY ${folder} PROPERTY SUBDIRECTORIES)
  foreach(each ${folders})
    moe_use_precompiled(${each})
  endforeach()
  get_property(targets DIRECTORY ${folder} PROPERTY BUILDSYSTEM_TARGETS)
  foreach(target ${targets})
    get_target_property(type ${target} TYPE)
    get_target_property(libraries ${target} LINK_LIBRARIES)
    if(target MATCHES "^moe_precompiled_" OR NOT libraries)
      continue()
    elseif(type STREQUAL STATIC_LIBRARY AND moe_program_flags IN_LIST libraries)
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_program)
    elseif(type MATCHES "^(STATIC_LIBRARY|OBJECT_LIBRARY)$")
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_library)
    elseif(type STREQUAL EXECUTABLE AND moe_test_flags IN_LIST libraries)
      target_precompile_headers(${target} REUSE_FROM moe_precompiled_test)
    endif()
  endforeach()
endfunction()
moe_use_precompiled(${PROJECT_SOURCE_DIR})
