# A project around this one, by add_subdirectory as FetchContent does it, without a build type: it is
# configured, and its commands are read. Nothing is built.
# Run: cmake -DSOURCE=<source tree> -DSCRATCH=<folder> -P subdirectory_test.cmake
file(REMOVE_RECURSE ${SCRATCH})
set(build ${SCRATCH}/build)
file(WRITE ${SCRATCH}/cmake/options.cmake "message(FATAL_ERROR \"the project's own module\")\n")
file(WRITE ${SCRATCH}/main.cc "#include <moe/moe.h>\nint main() {}\n")
file(WRITE ${SCRATCH}/CMakeLists.txt "cmake_minimum_required(VERSION 3.25)
project(around LANGUAGES CXX)
list(APPEND CMAKE_MODULE_PATH \${PROJECT_SOURCE_DIR}/cmake)
add_subdirectory(${SOURCE} moe)
add_executable(around main.cc)
target_link_libraries(around PRIVATE moe::moe)
")
# What the programs and tests alone need may be missing.
set(without -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON)
execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SCRATCH} -B ${build} ${without}
  -DMOE_ENABLE_CUDA=OFF -DCMAKE_EXPORT_COMPILE_COMMANDS=ON
  RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
if(NOT rc EQUAL 0)
  message(FATAL_ERROR "configure: exit code ${rc}\n${out}")
endif()

function(expect_no regex file)
  file(STRINGS ${build}/${file} lines REGEX "${regex}")
  if(lines)
    message(SEND_ERROR "${file}: ${lines}")
  endif()
endfunction()
expect_no("^(HWLOC|CCACHE|LLD)_" CMakeCache.txt)
expect_no("fuse-ld|ccache" build.ninja)
expect_no("\"file\": \"${SOURCE}/(moe/cli|tests|examples|benchmarks)/" compile_commands.json)
# The kernels are optimised, and what this project asks of its own files stays there.
file(STRINGS ${build}/compile_commands.json kernel REGEX "\"command\".*/rng\\.cc")
file(STRINGS ${build}/compile_commands.json main REGEX "\"command\".*/main\\.cc")
if(NOT kernel MATCHES " -ffp-contract=off .* -O2 " OR NOT main MATCHES " -I${SOURCE} "
    OR main MATCHES " -[OWfg]")
  message(SEND_ERROR "commands:\n${kernel}\n${main}")
endif()

execute_process(COMMAND ${CMAKE_COMMAND} --install ${build} --prefix ${SCRATCH}/prefix
  RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
file(GLOB_RECURSE installed ${SCRATCH}/prefix/*)
if(NOT rc EQUAL 0 OR installed)
  message(SEND_ERROR "install: exit code ${rc}, files '${installed}'\n${out}")
endif()
