# Writes OUTPUT, a header with the commit of ROOT, unless it is up to date: its includers are
# compiled anew only when the commit changes. "unknown" if ROOT is not a checkout of its own.
# Run: cmake -DROOT=<source tree> -DOUTPUT=<header> -P commit.cmake
cmake_minimum_required(VERSION 3.25)

function(git result)
  execute_process(COMMAND git -C ${ROOT} ${ARGN} OUTPUT_VARIABLE text RESULT_VARIABLE rc ERROR_QUIET
    OUTPUT_STRIP_TRAILING_WHITESPACE)
  if(NOT rc EQUAL 0)
    set(text "")
  endif()
  set(${result} "${text}" PARENT_SCOPE)
endfunction()

set(commit "unknown")
git(folder rev-parse --show-prefix)
git(hash rev-parse --short=12 HEAD)
if(hash AND NOT folder)
  git(changed status --porcelain --untracked-files=no)
  set(commit "${hash}")
  if(changed)
    string(APPEND commit "+")
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} CONTENT "#define MOE_COMMIT \"${commit}\"\n")
