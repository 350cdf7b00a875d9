#!/usr/bin/env bash
# A compiler launcher: runs nvcc, stores the output of `-Xptxas -v` in FOLDER/<object>.log and
# removes it from the build's output.
#
#   ptxas_log.sh FOLDER COMPILER ARGUMENT...
set -uo pipefail
folder=$1
shift
object=
for ((i = 1; i < $#; i++)); do
  if [[ ${!i} == -o ]]; then
    next=$((i + 1))
    object=$(basename "${!next}")
  fi
done
if [[ $object != *.o ]]; then
  exec "$@"
fi
mkdir -p "$folder"
log=$folder/$object.log
"$@" 2>"$log.all"
rc=$?
ptxas='^ptxas info|^ +[0-9]+ bytes stack frame'
grep -E "$ptxas" "$log.all" >"$log"
grep -vE "$ptxas" "$log.all" >&2
rm -f "$log.all"
exit $rc
