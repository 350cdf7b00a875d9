# Marks sections, groups and examples in what `moe COMMAND --help` prints, a paragraph after the
# other, as help2man reads them.
BEGIN { RS = ""; FS = "\n"; standard = "^(Options|Environment|Files|Examples)$" }

function section(name) {
  if (name != last) print (name ~ standard ? name ":" : "*" name "*") "\n"
  last = name
}

/^usage: / {
  sub(/^usage/, "Usage")
  gsub(/\n       moe /, "\001")
  gsub(/\n +/, " ") # of a line that goes on
  gsub(/\001/, "\n  or:  moe ")
  print $0 "\n"
  last = "Description" # with which a page begins
  next
}
/^  (moe|mpirun) / {
  section("Examples")
  gsub(/ \\\n +/, " ") # likewise
  gsub(/(^|\n)  /, "&$ ")
  print $0 "\n"
  next
}
$2 ~ /^  -/ { # a group of flags
  section("Options")
  sub(/\n/, /^Files\n/ ? " :\n" : ":\n") # else a section
  print $0 "\n"
  behind = 1
  next
}
{
  if (/^Settings: /) section("Environment")
  else if (behind && /^Files/) section("Files")
  else if (/^Exit codes: /) section("Exit status")
  else section(behind ? "Notes" : "Description")
  sub(/^(Settings|Files|Exit codes): /, "")
  if (/^[A-Z]/ && $2 ~ /^  [a-z0-9]+  /) sub(/\n/, ":\n") # a heading of words
  print $0 "\n"
}
