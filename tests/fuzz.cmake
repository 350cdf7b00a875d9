# Readers of untrusted files under libFuzzer: the corpus and 5 seconds each; longer by hand. The project is built with any compiler;
# these are built by their script with clang, and skipped, saying so, where it is missing. They bring
# their own sanitizers, so the sanitizer flavours leave them out.
if(NOT MOE_SANITIZE)
  foreach(target safetensors index config routing hf_config)
    add_test(NAME fuzz_${target} COMMAND ${CMAKE_CURRENT_SOURCE_DIR}/fuzz/run.sh
      ${target} ${CMAKE_CURRENT_BINARY_DIR}/fuzz/${target} 5)
    set_tests_properties(fuzz_${target} PROPERTIES LABELS fuzz TIMEOUT 600 SKIP_RETURN_CODE 77)
  endforeach()
endif()
