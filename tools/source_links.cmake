# Run by cmake --install: in the pages below FOLDER, links to what is only in the source become text.
set(link "\\]\\((\\.\\./)*((kernels|packaging|src|tests|tools|validation)(/[^)]*)?)\\)")
file(GLOB_RECURSE pages ${FOLDER}/*.md)
foreach(page IN LISTS pages)
  file(READ ${page} text)
  string(REGEX REPLACE "\\[([^]]*/[^]]*)${link}" "\\1" text "${text}")  # the path itself is shown
  string(REGEX REPLACE "\\[([^]]*)${link}" "\\1 (\\3 of the source)" text "${text}")
  file(WRITE ${page} "${text}")
endforeach()
