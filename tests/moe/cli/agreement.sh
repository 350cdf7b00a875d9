#!/usr/bin/env bash
# Ranks with different arguments, for every command that runs ranks: refused before any work.
#   bash agreement.sh <moe> <mpiexec> <golden data> <golden models>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=$2
data=$(realpath "$3")
models=$(realpath "$4")
cd "$work" || exit 1

# differ <pattern> <arguments of moe on rank 0...> : <those on rank 1...>: exit code 2, and one line
# that names the difference, both ranks and their hosts.
differ() {
  local pattern=$1 first=() arguments
  shift
  while [[ $1 != : ]]; do
    first+=("$1")
    shift
  done
  shift
  arguments="${first[*]} : $*"
  expect 2 "$arguments" "$mpiexec" -n 1 "$moe" "${first[@]}" : -n 1 "$moe" "$@"
  what=$arguments
  matches "^moe ${first[0]}: ranks 0 \(host $host\) and 1 \(host $host\) were given a different $pattern, expected" stderr
  (($(grep -c '^moe[ :]' stderr) == 1)) || fail "$what: $(grep '^moe[ :]' stderr)"
  [[ ! -s stdout ]] || fail "$what: wrote to stdout: $(head -n 3 stdout)"
}
host=$(uname -n)

# change <safetensors file> <tensor, as a regular expression>: changes the tensor's first byte.
change() {
  local head at
  head=$(od -An -t u8 -N 8 "$1" | tr -d ' ')
  at=$(head -c $((8 + head)) "$1" | grep -aoE "\"$2\":\\{[^}]*" | grep -oE 'data_offsets":\[[0-9]+' | grep -oE '[0-9]+$')
  cp "$1" before
  printf '\x11' | dd of="$1" bs=1 seek=$((8 + head + at)) conv=notrunc status=none
  (($(cmp -l before "$1" | wc -l) == 1)) || fail "change $*: $(cmp -l before "$1" | wc -l) bytes"
}

# Another build of the program: one whose text of the commit is another.
commit_of() { "$1" --version | sed -n 's/^commit *//p'; }
commit=$(commit_of "$moe")
LC_ALL=C sed "s/${commit:0:8}/01234567/g" "$moe" >another
chmod +x another
changed=$(commit_of ./another)
if [[ $changed != "$commit" ]]; then # a compiler may have cut the text into constants
  expect 2 "another build" "$mpiexec" -n 1 "$moe" bench memcpy : -n 1 ./another bench memcpy
  says "given a different commit of moe: $commit and $changed, expected the same on all" stderr
  (($(grep -c '^moe[ :]' stderr) == 1)) || fail "$what: $(cat stderr)"
fi

# Settings, of which agreed_ranks_test changes every one, and the operation.
layer=(bench layer --tokens 8 --hidden-size 16 --moe-ffn-hidden-size 16 -n 2 -T 0)
differ "--router: mixtral and gpt-oss" "${layer[@]}" : "${layer[@]}" --router gpt-oss
small=(-b 4K -e 4K -T 0 -n 2)
differ "command: bench alltoall and bench allreduce" bench alltoall "${small[@]}" : bench allreduce "${small[@]}"
sweep=(sweep --tokens 8 --hidden-size 16 --moe-ffn-hidden-size 16 -n 2 -T 0 --ep 1)
differ "--moe-expert-capacity-factor: 1,2 and 1,4" "${sweep[@]}" --capacity-factor 1,2 : "${sweep[@]}" --capacity-factor 1,4
tr a b <"$text" >other
differ "text \(--data\)" train "${model[@]}" --steps 1 : train "${model[@]}" --steps 1 --data other
differ "text \(--data\)" sweep --measure train "${model[@]}" --steps 1 : sweep --measure train "${model[@]}" --steps 1 --data other
# One name, but another file on each host.
mkdir m1 m2
printf '1 1\n1 1\n' >m1/m
printf '1 1\n1 2\n' >m2/m
traffic=(bench alltoallv "${small[@]}" --routing matrix:m)
expect 2 "routing files" "$mpiexec" -n 1 -wdir "$work/m1" "$moe" "${traffic[@]}" : -n 1 -wdir "$work/m2" "$moe" "${traffic[@]}"
matches "were given a different file \(--routing\), expected" stderr
# Settings that may differ do.
expect 0 "threads and form" "$mpiexec" -n 1 "$moe" "${layer[@]}" --threads 1 : -n 1 "$moe" "${layer[@]}" --threads 2 -o json

# Copies of one model that differ in one weight of one expert: only one rank reads that expert.
cp -r "$models/mixtral" a
cp -r a b
change b/model.safetensors '[^"]*layers.0[^"]*experts.3.w2.weight'
printf '\1\0\7\0\43\0\12\0%.0s' $(seq 8192) >ids # the model has 40
eval=(eval --tokens ids --seq-length 16 --eval-sequences 8 --ep 2)
differ "model \(--checkpoint\)" "${eval[@]}" --checkpoint a : "${eval[@]}" --checkpoint b
from=(train -q --tokens ids --seq-length 16 --steps 1 --ep 2)
differ "model \(--init-from\)" "${from[@]}" --init-from a : "${from[@]}" --init-from b
generate=(generate --prompt-tokens 1,2 --max-new-tokens 2)
differ "config.json \(--checkpoint\)" "${generate[@]}" --checkpoint a : "${generate[@]}" --checkpoint "$models/olmoe"
cp -r a c
expect 0 "two copies that are equal" "$mpiexec" -n 1 "$moe" "${eval[@]}" --checkpoint a : -n 1 "$moe" "${eval[@]}" --checkpoint c
case=$data/mixtral-1
one=(layer -q --hf-config "$case/config.json" --output y)
cp "$case/io.safetensors" x
change x x
differ "x \(--input\)" "${one[@]}" --weights "$case" --input "$case/io.safetensors" : "${one[@]}" --weights "$case" --input x
cp "$case/model.safetensors" w.safetensors
change w.safetensors '[^"]*experts.1.w1.weight'
differ "weights \(--weights\)" "${one[@]}" --input x --weights "$case" : "${one[@]}" --input x --weights w.safetensors

# A host with another name.
if unshare -u true; then
  away=(unshare -u sh -c 'echo elsewhere >/proc/sys/kernel/hostname && exec "$@"' sh)
  expect 2 "two hosts" "$mpiexec" -n 1 "$moe" "${layer[@]}" : -n 1 "${away[@]}" "$moe" "${layer[@]}" --topk 1
  matches "ranks 0 \(host $host\) and 1 \(host elsewhere\) were given a different --moe-router-topk: 2 and 1," stderr
fi
finish
