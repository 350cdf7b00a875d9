# A project that includes this one by add_subdirectory, as FetchContent does, without a build type:
# it is configured, also with flags and an Abseil of its own, and its compile commands are checked.
# Nothing is built.
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
# Libraries of programs and tests alone may be missing.
set(without -DCMAKE_DISABLE_FIND_PACKAGE_Boost=ON -DCMAKE_DISABLE_FIND_PACKAGE_fmt=ON
  -DCMAKE_DISABLE_FIND_PACKAGE_GTest=ON)
function(configure)
  execute_process(COMMAND ${CMAKE_COMMAND} -G Ninja -S ${SCRATCH} -B ${build} ${without}
    -DCMAKE_EXPORT_COMPILE_COMMANDS=ON ${ARGN} RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT rc EQUAL 0)
    message(FATAL_ERROR "configure ${ARGN}: exit code ${rc}\n${out}")
  endif()
endfunction()
configure()

function(expect_no regex file)
  file(STRINGS ${build}/${file} lines REGEX "${regex}")
  if(lines)
    message(SEND_ERROR "${file}: ${lines}")
  endif()
endfunction()
# Programs' libraries, compiler launchers, and backends that the machine may have must not be looked
# for.
expect_no("^(HWLOC|CCACHE|LLD|MPI|CUDAToolkit)_|^MOE_NVCC:" CMakeCache.txt)
expect_no("fuse-ld|ccache" build.ninja)
expect_no("\"file\": \"${SOURCE}/(moe/cli|tests|examples|benchmarks)/" compile_commands.json)
# The kernels are optimised, and flags for this project's own files stay there.
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

# A project that treats warnings as errors, disables exceptions and has its own Abseil.
file(READ ${SCRATCH}/CMakeLists.txt around)
set(abseil "")
foreach(name fixed_array function_ref inlined_vector span status statusor strings time)
  string(APPEND abseil "add_library(absl::${name} INTERFACE IMPORTED GLOBAL)\n")
endforeach()
string(REPLACE "add_subdirectory" "${abseil}add_compile_options(-Werror -fno-exceptions)\nadd_subdirectory"
  around "${around}")
file(WRITE ${SCRATCH}/CMakeLists.txt "${around}")
file(REMOVE_RECURSE ${build})
configure(-DCMAKE_DISABLE_FIND_PACKAGE_absl=ON)
file(STRINGS ${build}/compile_commands.json kernel REGEX "\"command\".*/rng\\.cc")
if(NOT kernel MATCHES " -Werror -fno-exceptions .* -fexceptions .* -Wno-error ")
  message(SEND_ERROR "flags of the project around reach the library's sources:\n${kernel}")
endif()

# With nvcc: no launcher, and the flags for the C++ compiler.
find_program(NVCC nvcc PATHS /usr/local/cuda/bin)
if(NVCC)
  configure(-DCMAKE_DISABLE_FIND_PACKAGE_absl=ON -DMOE_ENABLE_CUDA=ON)
  file(STRINGS ${build}/compile_commands.json kernel REGEX "\"command\".*/adamw_cuda\\.cu")
  if(kernel MATCHES " -Werror " OR NOT kernel MATCHES " -Xcompiler=-Werror ")
    message(SEND_ERROR "flags of the project around reach nvcc:\n${kernel}")
  endif()
  file(STRINGS ${build}/CMakeFiles/rules.ninja launched REGEX "ptxas_log\\.sh")
  if(launched MATCHES "\"\"" OR NOT launched MATCHES "ptxas_log\\.sh [^ ]+ [^ ]*nvcc ")
    message(SEND_ERROR "nvcc is not what ptxas_log.sh runs:\n${launched}")
  endif()
endif()
