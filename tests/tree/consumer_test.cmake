# Installs the build into a scratch folder, then builds and runs the README's first program against
# it, as a user would, and compiles every header.
# Run: cmake -DBUILD=<build> -DSOURCE=<source tree> -DSCRATCH=<folder>
#   [-DCOMPILER_LAUNCHER=<ccache>] -P consumer_test.cmake
function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE rc OUTPUT_VARIABLE out ERROR_VARIABLE out)
  if(NOT rc EQUAL 0)
    list(JOIN ARGN " " command)
    message(FATAL_ERROR "${command}: exit code ${rc}\n${out}")
  endif()
  set(output "${out}" PARENT_SCOPE)
endfunction()

# By the environment: as an argument it would fall apart at its semicolons.
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} "${COMPILER_LAUNCHER}")
file(REMOVE_RECURSE ${SCRATCH})
set(project ${SCRATCH}/project)
file(MAKE_DIRECTORY ${project})
file(COPY ${SOURCE}/tests/tree/consumer/CMakeLists.txt ${SOURCE}/examples/first_layer.cc
  DESTINATION ${project})
file(COPY ${SOURCE}/examples/custom_gate.cc DESTINATION ${project})
run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${SCRATCH}/prefix)
# The include path must hold nothing but moe-1, or the names kernels/ and comm/ reach the user.
file(GLOB names RELATIVE ${SCRATCH}/prefix/include ${SCRATCH}/prefix/include/*)
if(NOT names STREQUAL "moe-1")
  message(FATAL_ERROR "include/ holds '${names}', expected moe-1 alone")
endif()
foreach(text man/man1/moe.1 man/man1/moe-train.1 bash-completion/completions/moe
    zsh/site-functions/_moe fish/vendor_completions.d/moe.fish)
  file(SIZE ${SCRATCH}/prefix/share/${text} bytes)
  if(bytes LESS 1000)
    message(FATAL_ERROR "share/${text} has ${bytes} bytes")
  endif()
endforeach()
run(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --build ${project}/build)
run(${project}/build/first_layer)
# It learns: the last loss it prints is well below the first.
string(REGEX MATCHALL "loss [0-9.]+" losses "${output}")
list(LENGTH losses count)
if(count LESS 2)
  message(FATAL_ERROR "first_layer printed no losses:\n${output}")
endif()
list(GET losses 0 first)
list(GET losses -1 last)
string(SUBSTRING ${first} 5 -1 first)
string(SUBSTRING ${last} 5 -1 last)
if(NOT last LESS first)
  message(FATAL_ERROR "the loss did not fall:\n${output}")
endif()
message(STATUS "loss ${first} -> ${last}")

# A gate registered from outside, built the same way.
file(WRITE ${project}/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(custom_gate LANGUAGES CXX)\nfind_package(moe REQUIRED)\n"
  "add_executable(custom_gate custom_gate.cc)\ntarget_link_libraries(custom_gate PRIVATE moe::moe)\n")
run(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build_gate -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --build ${project}/build_gate)
run(${project}/build_gate/custom_gate)
if(NOT output MATCHES "gradient agrees with differences")
  message(FATAL_ERROR "custom_gate printed:\n${output}")
endif()

# Every header that is installed compiles alone, against the installed tree.
file(GLOB_RECURSE headers RELATIVE ${SCRATCH}/prefix/include/moe-1 ${SCRATCH}/prefix/include/*.h)
set(sources "")
foreach(header ${headers})
  string(MAKE_C_IDENTIFIER ${header} name)
  file(WRITE ${project}/headers/${name}.cc "#include <${header}>\n")
  list(APPEND sources headers/${name}.cc)
endforeach()
list(JOIN sources " " sources)
file(WRITE ${project}/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(headers LANGUAGES CXX)\nfind_package(moe REQUIRED)\n"
  "add_library(headers OBJECT ${sources})\ntarget_link_libraries(headers PRIVATE moe::moe)\n")
run(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build_headers
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --build ${project}/build_headers -- -k 0)
list(LENGTH headers count)
message(STATUS "${count} headers compile alone")

# A version that was not asked for is refused.
file(WRITE ${project}/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\nfind_package(moe 99 REQUIRED)\n")
execute_process(COMMAND ${CMAKE_COMMAND} -S ${project} -B ${project}/build99
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix RESULT_VARIABLE rc OUTPUT_QUIET ERROR_QUIET)
if(rc EQUAL 0)
  message(FATAL_ERROR "find_package(moe 99) was accepted")
endif()
