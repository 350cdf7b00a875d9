# Installs the build into a scratch folder, then builds and runs the program of docs/first_layer.md
# against it, as a user would, and compiles every header.
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
# Runs a command whose output must match `pattern`.
function(run_prints pattern)
  run(${ARGN})
  if(NOT output MATCHES "${pattern}")
    message(FATAL_ERROR "${ARGN} printed:\n${output}")
  endif()
endfunction()

# In the environment, because an argument would be split at its semicolons.
set(ENV{CMAKE_CXX_COMPILER_LAUNCHER} "${COMPILER_LAUNCHER}")
file(REMOVE_RECURSE ${SCRATCH})
set(project ${SCRATCH}/project)
file(MAKE_DIRECTORY ${project})
file(COPY ${SOURCE}/tests/tree/consumer/CMakeLists.txt ${SOURCE}/examples/first_layer.cc
  DESTINATION ${project})
file(COPY ${SOURCE}/examples/custom_gate.cc ${SOURCE}/examples/own_optimizer.cc ${SOURCE}/examples/first_layer.c
  ${SOURCE}/examples/load_layer.cc ${SOURCE}/tests/tree/consumer/host_program.cc DESTINATION ${project})
run(${CMAKE_COMMAND} --install ${BUILD} --strip --prefix ${SCRATCH}/prefix)
file(GLOB_RECURSE libraries ${SCRATCH}/prefix/libmoe*.a ${SCRATCH}/prefix/libmoe*.so)
run(readelf -SW ${libraries})
if(NOT output MATCHES " \\.text " OR output MATCHES " \\.debug_")
  message(FATAL_ERROR "debug information in, or no code in: ${libraries}")
endif()
# The include path must hold nothing but moe-1, or the names kernels/ and comm/ reach the user.
file(GLOB names RELATIVE ${SCRATCH}/prefix/include ${SCRATCH}/prefix/include/*)
if(NOT names STREQUAL "moe-1")
  message(FATAL_ERROR "include/ holds '${names}', expected moe-1 alone")
endif()
set(pages "")
if(EXISTS ${BUILD}/moe/cli/man1) # if help2man is installed
  set(pages man/man1/moe.1 man/man1/moe-train.1)
endif()
foreach(text ${pages} bash-completion/completions/moe zsh/site-functions/_moe
    fish/vendor_completions.d/moe.fish doc/moe/docs/checkpoint.md doc/moe/examples/first_layer.cc)
  file(SIZE ${SCRATCH}/prefix/share/${text} bytes)
  if(bytes LESS 500)
    message(FATAL_ERROR "share/${text} has ${bytes} bytes")
  endif()
endforeach()
run(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build -DCMAKE_BUILD_TYPE=Release
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --build ${project}/build)
set(learns "loss 0\\.0[1-9].*step 200  loss 0\\.00")
run_prints("${learns}" ${project}/build/first_layer)

# All programs, built with pkg-config's flags, under warnings that reject aggregates without a
# default for each member. pkg-config's paths are relative to moe.pc, so the tree is moved.
file(RENAME ${SCRATCH}/prefix ${SCRATCH}/moved)
file(GLOB_RECURSE pc ${SCRATCH}/moved/moe.pc)
cmake_path(GET pc PARENT_PATH pc_dir)
cmake_path(GET pc_dir PARENT_PATH lib_dir)
set(ENV{PKG_CONFIG_PATH} ${pc_dir})
set(run_here ${CMAKE_COMMAND} -E env LD_LIBRARY_PATH=${lib_dir})
file(WRITE ${project}/pkg_config.sh "exec c++ -std=c++20 -Wall -Wextra -Werror ${project}/$1.cc -o ${project}/$1 \
  $(pkg-config --cflags --libs --static moe)\n")
run(sh -c "printf '%s\n' first_layer own_optimizer custom_gate load_layer host_program |
  xargs -P $(nproc) -n 1 sh ${project}/pkg_config.sh")
run(sh -c "cc -std=c11 -c ${project}/first_layer.c -o ${project}/first_layer_c.o $(pkg-config --cflags moe)")
run(sh -c "c++ ${project}/first_layer_c.o -o ${project}/first_layer_c $(pkg-config --libs --static moe)")
run_prints("${learns}" ${run_here} ${project}/first_layer_c)
run_prints("64 tokens" ${run_here} ${project}/load_layer ${SOURCE}/tests/golden/models/qwen3_moe)
file(MAKE_DIRECTORY ${SCRATCH}/model)
run(${run_here} ${project}/host_program ${SOURCE}/tests/golden/models/qwen3_moe ${SCRATCH}/model)
run_prints("gradient agrees with differences" ${run_here} ${project}/custom_gate)
file(RENAME ${SCRATCH}/moved ${SCRATCH}/prefix)

# The installed headers compile in the order of their names and in the reverse, each twice, under the
# warnings of a strict project: pkg-config and add_subdirectory do not make them system headers.
# (The test headers_compile_alone compiles each alone.)
set(strict "-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Werror")
file(GLOB_RECURSE headers RELATIVE ${SCRATCH}/prefix/include/moe-1 ${SCRATCH}/prefix/include/*.h)
list(REMOVE_ITEM headers moe/torch.h) # needs LibTorch
set(sources "")
foreach(order forward reverse)
  list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>\n" OUTPUT_VARIABLE includes)
  list(JOIN includes "" includes)
  file(WRITE ${project}/headers/${order}.cc "${includes}${includes}")
  list(APPEND sources headers/${order}.cc)
  list(REVERSE headers)
endforeach()
list(JOIN sources " " sources)
file(WRITE ${project}/CMakeLists.txt
  "cmake_minimum_required(VERSION 3.25)\nproject(headers LANGUAGES CXX)\nfind_package(moe REQUIRED)\n"
  "set(CMAKE_NO_SYSTEM_FROM_IMPORTED ON)\nset(CMAKE_CXX_FLAGS \"${strict}\")\n"
  "add_library(headers OBJECT ${sources})\ntarget_link_libraries(headers PRIVATE moe::moe)\n")
run(${CMAKE_COMMAND} -G Ninja -S ${project} -B ${project}/build_headers
  -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix)
run(${CMAKE_COMMAND} --build ${project}/build_headers -- -k 0)
list(LENGTH headers count)
message(STATUS "${count} headers compile")
find_program(CLANG clang++)
if(CLANG)
  run(sh -c "${CLANG} -std=c++20 ${strict} -fsyntax-only -I${SCRATCH}/prefix/include/moe-1 ${project}/headers/forward.cc")
endif()

# A version or a component that this build does not have is refused, and the message names it.
foreach(wrong "99" "COMPONENTS nothing")
  file(WRITE ${project}/CMakeLists.txt
    "cmake_minimum_required(VERSION 3.25)\nproject(p LANGUAGES CXX)\nfind_package(moe ${wrong} REQUIRED)\n")
  execute_process(COMMAND ${CMAKE_COMMAND} -S ${project} -B ${project}/build_wrong
    -DCMAKE_PREFIX_PATH=${SCRATCH}/prefix RESULT_VARIABLE rc OUTPUT_QUIET ERROR_VARIABLE out)
  if(rc EQUAL 0 OR NOT out MATCHES "\"99\"|moe was built without nothing")
    message(FATAL_ERROR "find_package(moe ${wrong}): exit code ${rc}\n${out}")
  endif()
endforeach()
