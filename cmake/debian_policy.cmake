# What Debian asks of every package beside its files: copyright, changelog, manual pages compressed,
# zsh's completion where its zsh looks. Run by cpack on the folders that it makes packages of, one a component.
foreach(component ${CPACK_COMPONENTS_ALL})
  set(share ${CPACK_TEMPORARY_DIRECTORY}/${component}/usr/share)
  string(TOUPPER ${component} name)
  set(package ${CPACK_DEBIAN_${name}_PACKAGE_NAME})
  set(doc ${share}/doc/${package})
  string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
  file(REMOVE ${share}/doc/moe/LICENSE) # copyright has it
  if(EXISTS ${share}/doc/moe AND NOT name STREQUAL "PROGRAM")
    file(RENAME ${share}/doc/moe ${doc})
  endif()
  file(WRITE ${doc}/changelog "moe (${CPACK_PACKAGE_VERSION}) unstable; urgency=medium

  * CHANGELOG.md of the sources says what changed.

 -- ${CPACK_PACKAGE_CONTACT}  ${date}
")
  file(WRITE ${doc}/copyright "Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: 2026 the authors of moe
License: Apache-2.0
 On Debian systems the text is in /usr/share/common-licenses/Apache-2.0.
")
  if(component STREQUAL "lib") # cpack 3.25 always does
    file(WRITE ${share}/lintian/overrides/${package} "${package}: maintscript-calls-ldconfig\n")
  endif()
  if(EXISTS ${share}/zsh/site-functions)
    file(RENAME ${share}/zsh/site-functions ${share}/zsh/vendor-completions)
  endif()
  file(GLOB pages ${share}/man/man1/*)
  execute_process(COMMAND gzip -9n ${doc}/changelog ${pages} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
