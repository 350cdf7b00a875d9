#!/bin/sh
# The loss falls, and ranks 1 to 4, threads or processes, end with the same weights.
# Run: torch_gpt_test.sh PROGRAM [MPIEXEC]
set -eu
one=$("$1" 1)
echo "$one"
echo "$one" | grep -q 'step 60  loss [01]\.'
for ranks in 2 3 4; do
  test "$("$1" $ranks | grep weights)" = "$(echo "$one" | grep weights)"
done
if [ $# -gt 1 ]; then
  test "$("$2" -n 2 "$1" | grep weights)" = "$(echo "$one" | grep weights)"
fi
