#!/usr/bin/env bash
# Whatever is wrong with a call: the exit code, one line on standard error that says what is and
# what was expected, nothing on standard output, and no file.
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
cd "$work" || exit 1

outputs=("$work/out")
train() { refused "$1" "$2" train "${model[@]}" --steps 2 --out "$work/out" "${@:3}"; }

# Commands and flags.
refused 2 "no command"
refused 2 "unknown command 'trian'; did you mean 'train'?" trian
refused 2 "no shell, expected moe completion bash|zsh|fish" completion
refused 2 "unknown shell 'zhs', expected moe completion bash|zsh|fish; did you mean 'zsh'?" \
  completion zhs
refused 2 "unexpected argument 'fish'" completion bash fish
refused 2 "unknown flag '--shell'" completion --shell bash
train 2 "unknown flag '--num-expert'; did you mean '--num-experts'?" --num-expert 8
train 2 "unknown flag '--profile'" --profile x
train 2 "unknown flag '--cuda-graph'" --cuda-graph
train 2 "--share-device is given, expected --device cuda" --share-device
train 2 "--lr is 'inf', expected a finite number" --lr inf
train 2 "--bucket-size-mb is '1e300', expected a finite number of at most 1048576" --bucket-size-mb 1e300
train 2 "--bucket-size-mb is 1e-300, expected at least 1e-6, a byte" --bucket-size-mb 1e-300
for command in train bench\ layer layer sweep verify; do
  # shellcheck disable=SC2086
  refused 2 "--comm-timeout is '1e300', expected a finite number of at most 31536000" $command --comm-timeout 1e300
done
refused 2 "--timeout is '1e300'" bench layer -T 1e300
for command in train bench\ layer layer sweep; do
  # shellcheck disable=SC2086
  refused 2 "--threads is '2147483647', expected a whole number of at most 4096" $command --threads 2147483647
done
train 2 "--ranks is 2000, expected at most 512 threads of one process" --ranks 2000
train 2 "--adam-eps is '1e300', expected a finite number" --adam-eps 1e300 # a float
train 2 "--capacity-factor is '1e300', expected a finite number" --capacity-factor 1e300

: >empty
printf x >byte
mkdir results

# The environment and configuration files.
MOE_SIMD=AVX1 train 2 "MOE_SIMD is 'AVX1', expected one of this CPU's: "
for file in empty byte; do
  train 2 "$file: malformed JSON" --config $file
done
train 2 "'results' is a folder, expected a file" --config results
mkfifo fifo
for file in fifo /dev/zero; do
  train 2 "'$file' is a device or pipe, expected a file" --config $file
done
(printf '{"' && head -c 50000000 /dev/zero | tr '\0' k && printf '": 1}') >config.json
train 2 "config.json: JSON of 50000007 bytes, expected at most 1048576" --config config.json
(printf '{"' && head -c 5000 /dev/zero | tr '\0' k && printf '": 1}') >config.json
train 2 "config.json: a key of 5000 bytes, expected at most 200" --config config.json
printf '{"a\\u001b[2J": 1}' >config.json
train 2 "unknown key 'a\\x1b[2J'" --config config.json
printf '{"steps": "\\u001b[2J"}' >config.json
train 2 "is '\\x1b[2J', expected a whole number" --config config.json

# The text.
refused 2 "--data is missing" train --out "$work/out"
train 2 "'no/such' does not exist" --data no/such
train 2 "'empty' is empty" --data empty
mkdir folder
refused 2 "no text in" train --data folder --out "$work/out"
make_text short 16415 # a byte less than a block and a sequence of 33
refused 2 "16416 bytes or more" train --data short --seq-length 31 --out "$work/out"
train 2 "of one step: give more text, or at most" --micro-batches 10000
train 2 "is a device or pipe" --data /dev/null

# Tokens.
ids=(train --out "$work/out" --seq-length 31 --tokens)
refused 2 "'no/such'" "${ids[@]}" no/such
refused 2 "'empty' is empty" "${ids[@]}" empty
refused 3 "byte: 1 bytes, expected a multiple of 2" "${ids[@]}" byte
head -c 32830 /dev/zero | tr '\0' '\7' >few # a token less than a block and a sequence of 33
refused 2 "'few': token 0 is" "${ids[@]}" few
refused 2 "16416 tokens or more" "${ids[@]}" few --vocab-size 65536
cp short x.bin
cp short x.idx
refused 2 "'x' does not exist, expected a text file or a folder of them: --tokens x reads x.bin and .idx" train --data x
refused 3 "--tokens: x.idx: does not begin with MMIDIDX" "${ids[@]}" x
refused 3 "--tokens: $text: is text, expected a bare array of ids: --data reads text" "${ids[@]}" "$text"
LC_ALL=C sed -z 's/./&\x00\x00\x00/g' "$text" >wide
refused 2 "--tokens: 'wide': every second id is 0, which makes the others lower halves, expected --tokens-dtype uint32" \
  "${ids[@]}" wide
refused 3 "--data: wide: is binary, with NUL bytes, expected text: --tokens reads token ids" train --data wide
refused 2 "--data and --tokens" "${ids[@]}" x --data short

# Empty files, files of one byte, and folders where files are expected.
bench=(bench alltoallv -b 1K -e 1K)
for file in empty byte; do
  for kind in matrix trace; do
    refused 3 "$file" "${bench[@]}" --routing $kind:$file
  done
  refused 3 "RUN: $file: " report $file
done
refused 3 "--resume: byte: line 1" sweep --resume byte
for kind in matrix trace; do
  refused 2 "'results' is a folder, expected a file" "${bench[@]}" --routing $kind:results
done
refused 2 "--resume" sweep --resume results
mkdir results/metrics.jsonl
refused 2 "'results/metrics.jsonl' is a folder, expected a file" report results
refused 2 "16416 bytes or more" train --data byte --seq-length 31 --out "$work/out"

# The model and its layout.
train 2 "--ep is 3, expected a divisor of the 4 ranks: 1, 2, 4" --ep 3
train 2 "--moe-router-topk is 2, expected 1" --router switch --topk 2
train 2 "--moe-pad-expert-input-to-capacity is true, expected" --moe-pad-expert-input-to-capacity
train 2 "--hysteresis is 0, expected at least 1" --dtype f16 --hysteresis 0

# What this build or place has not.
train 2 "--grouped-gemm is mma, expected auto" --grouped-gemm mma
train 2 "--tensor-leaves is '3'" --tensor-leaves 3
RANK=8 WORLD_SIZE=2 LOCAL_RANK=0 MASTER_ADDR=a MASTER_PORT=1 train 2 "RANK is 8 and WORLD_SIZE is 2"
# What the first of all processes does not say, the first of a host does.
SLURM_STEP_ID=0 SLURM_PROCID=2 SLURM_NTASKS=4 SLURM_LOCALID=0 train 2 "--topk has no value" --topk
OMPI_COMM_WORLD_RANK=0 OMPI_COMM_WORLD_SIZE=3 train 2 "--ranks is 4" --ranks 4

# Colours, also into a pipe where they are asked for, and then from every command.
red=$'\033[31m' yellow=$'\033[33m' cyan=$'\033[36m'
for command in train sweep bench layer verify report ckpt doctor; do
  run "$moe" "$command" --nonsense --color always
  says "${red}moe $command:" "$work/stderr"
done
MOE_STEP=1 MOE_WARMUP_ITERS=2 expect 0 "--color always" "$moe" train "${model[@]}" --steps 1 --color always
says "${cyan}step " "$work/stderr"
says "moe train: ${yellow}warning:" "$work/stderr"
# MOE_WARMUP_ITERS is of moe bench.
(($(grep -c warning "$work/stderr") == 1)) || fail "variables: $(grep warning "$work/stderr")"
says "MOE_STEP sets nothing; did you mean 'MOE_STEPS'?" "$work/stderr"
MOE_STEP=1 run "$moe" train "${model[@]}" --steps 1
[[ $(cat "$work/stdout" "$work/stderr") != *$'\033'* ]] || fail "a pipe has colours unasked"

# Files.
: >file
refused 2 "--out is 'file', which is a file" train "${model[@]}" --out file
refused 4 "cannot make the folder '/proc/out'" train "${model[@]}" --out /proc/out

# An earlier run's results outlive a refused call.
mkdir kept
echo kept >kept/metrics.jsonl
expect 2 "kept" "$moe" train "${model[@]}" --out kept --ep 3
[[ $(cat kept/metrics.jsonl) == kept ]] || fail "a refused call touched an earlier run"

# No output takes the place of an input or of another output.
mkdir texts
cp "$text" texts/book
ln texts/book linked
echo '{"seed": 1}' >config.json
one_step=(train "${model[@]}" --steps 1)
for flag in --trace --record-routing; do
  refused 2 "expected another file than --data" "${one_step[@]}" --data texts $flag linked
  refused 2 "expected another file than --config" "${one_step[@]}" --config config.json $flag ./config.json
  refused 2 "expected another file than --out" "${one_step[@]}" --out new $flag new/../new/metrics.jsonl
done
refused 2 "expected another file than --record-routing" "${one_step[@]}" --record-routing r --trace "$PWD/r"
refused 2 "--record-routing: 20000000 records, steps x MoE layers, is more than can be read back, expected at most 1048576" \
  train "${model[@]}" --steps 10000000 --record-routing r
cmp -s "$text" texts/book || fail "the text was written to"
[[ ! -e new && ! -e r ]] || fail "a refused call left files"

refused 2 "--ranks is 0, expected at least 1" doctor --ranks 0
refused 2 "unknown flag '--rank'; did you mean '--ranks'?" doctor --rank 2
run "$moe" doctor
((rc == 0 || rc == 1)) || fail "doctor: exit code $rc"
matches '^[a-z]* *cores '
run "$moe" doctor -o csv -oe jsonl
head -n 1 "$work/stdout" | grep -qx 'verdict,subject,finding,remedy' || fail "doctor -o csv: no header"
grep -q '^{"verdict":"[a-z]*","subject":"cores"' "$work/stderr" || fail "doctor -oe jsonl: no cores"
finish
