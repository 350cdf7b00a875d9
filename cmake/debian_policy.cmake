# Debian policy for every package beside its files: copyright, changelog, compressed manual pages,
# zsh's completion in Debian's folder. Run by cpack on the folders of the packages, one for each
# component.
foreach(component ${CPACK_COMPONENTS_ALL})
  set(share ${CPACK_TEMPORARY_DIRECTORY}/${component}/usr/share)
  string(TOUPPER ${component} name)
  set(package ${CPACK_DEBIAN_${name}_PACKAGE_NAME})
  set(doc ${share}/doc/${package})
  string(TIMESTAMP date "%a, %d %b %Y %H:%M:%S +0000" UTC)
  file(REMOVE ${share}/doc/moe/LICENSE) # the file copyright contains it
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
  if(component STREQUAL "program")
    file(APPEND ${doc}/copyright "
Files: usr/bin/moe
Copyright: 2026 the authors of moe
           2014-2022 Chart.js Contributors
License: Apache-2.0 and Expat
Comment: moe report puts Chart.js, of which the program has a copy, into its pages.

License: Expat
 Permission is hereby granted, free of charge, to any person obtaining a copy
 of this software and associated documentation files (the \"Software\"), to deal
 in the Software without restriction, including without limitation the rights
 to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
 copies of the Software, and to permit persons to whom the Software is
 furnished to do so, subject to the following conditions:
 .
 The above copyright notice and this permission notice shall be included in all
 copies or substantial portions of the Software.
 .
 THE SOFTWARE IS PROVIDED \"AS IS\", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
 IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
 FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
 AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
 LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
 OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
 SOFTWARE.
")
  endif()
  if(component STREQUAL "lib") # cpack 3.25 always does
    file(WRITE ${share}/lintian/overrides/${package} "${package}: maintscript-calls-ldconfig\n")
  endif()
  if(EXISTS ${share}/zsh/site-functions)
    file(RENAME ${share}/zsh/site-functions ${share}/zsh/vendor-completions)
  endif()
  file(GLOB pages ${share}/man/man1/*)
  execute_process(COMMAND gzip -9n ${doc}/changelog ${pages} COMMAND_ERROR_IS_FATAL ANY)
endforeach()
