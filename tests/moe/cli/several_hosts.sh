#!/usr/bin/env bash
# Ranks on two hosts, which are namespaces of this one: bash several_hosts.sh <moe> <mpiexec>
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
mpiexec=$2
source "$(dirname "${BASH_SOURCE[0]}")/namespaces.sh"
if ! namespaces_allowed; then
  echo "SKIPPED: namespaces are not allowed here: $(cat "$work/stderr")"
  exit 77
fi
start_host host-a
start_host host-b
hosts=("$(cat "$work/hosts/host-a")" "$(cat "$work/hosts/host-b")")
# on_hosts <ranks' hosts, as "0 0 1 1"> <arguments of moe...>
cat >"$work/enter" <<'ENTER'
#!/usr/bin/env bash
read -ra host <<<"$1"
exec nsenter --target "${host[OMPI_COMM_WORLD_RANK]}" --pid --uts --mount "${@:2}"
ENTER
chmod +x "$work/enter"
on_hosts() {
  local host processes=()
  for host in $1; do processes+=("${hosts[host]}"); done
  run "$mpiexec" -n "${#processes[@]}" "$work/enter" "${processes[*]}" "$moe" "${@:2}"
  what="hosts $1: ${*:2}"
}

train=(train "${model[@]}" --steps 2)
expect 0 "one host" "$mpiexec" -n 4 "$moe" "${train[@]}" --ep 4 --quiet --out "$work/one"
matches "^experts: to another node +0 B"
on_hosts "0 0 1 1" "${train[@]}" --ep 4 --out "$work/two"
expect 0 "two hosts"
matches "^experts: to a rank of the node +[1-9]"
matches "^experts: to another node +[1-9]"
says "hosts  2; all expert-parallel groups cross hosts" "$work/stderr"
same_bits "$work/one" "$work/two"

on_hosts "0 0 1 1" "${train[@]}" --ep 4 --quiet --dispatch hierarchical --out "$work/hops"
expect 0 "two hops"
matches "^experts: to another node +[1-9]"
same_bits "$work/one" "$work/hops"
on_hosts "0 1 0 1" "${train[@]}" --ep 2 --dispatch hierarchical --out "$work/mixed"
expect 0 "hosts in turn"
says "hosts  2; all expert-parallel groups cross hosts" "$work/stderr"

on_hosts "0 0 0 1" "${train[@]}" --ep 2 --node-size 2
expect 2 "a node of two hosts"
says "--node-size: nodes of 2 ranks: ranks 0 and 1 of a group of 2 are on different hosts, expected nodes of 1" \
  "$work/stderr"

on_hosts "0 0 1 1" bench alltoall -b 4K -e 4K -T 0 -n 2
expect 0 "bench"
says "# Bytes by distance    : self 4096, same host 4096, cross host 8192 (all ranks, one call of size 4096; 2 hosts)"

# A host is lost, the job goes on with the other, the host comes back, and ranks fail at random. The
# steps take several times as long as the faults.
printf 'host-a slots=2\nhost-b:2\n' >"$work/list"
long=(train "${model[@]}" --quiet --steps 800)
expect 0 "undisturbed" "$moe" "${long[@]}" --ranks 4 --out "$work/whole"
# newer_than <checkpoint>: sets latest once there is another one.
newer_than() {
  latest=$(cat "$work/saved/latest" 2>/dev/null)
  [[ -n $latest && $latest != "$1" ]]
}
# strike <signal>: hits one of the ranks; returns whether there was one.
strike() {
  local ranks
  mapfile -t ranks < <(ranks_of "train .*--save $work/saved .*--resume auto")
  ((${#ranks[@]})) && kill "-$1" "${ranks[RANDOM % ${#ranks[@]}]}"
}
RANDOM=1
{
  latest=
  await 60 newer_than "" && kill -9 "${hosts[1]}"
  await 60 newer_than "$latest" && start_host host-b
  for signal in SEGV STOP KILL; do
    await 60 newer_than "$latest" || break
    sleep "0.0$((RANDOM % 10))"
    await 60 strike "$signal" || break
  done
} &
expect 0 "random faults" "$moe" launch --hosts "$work/list" --nodes 1:2 --rsh "$work/rsh" --restart-delay 0.1 \
  --launcher-timeout 5 -- \
  moe "${long[@]}" --ep auto --comm-timeout 3 --out "$work/lost" --save "$work/saved" --save-interval 10
wait $!
says "no answer from host-b" "$work/stderr"
says "restart 3 of 20" "$work/stderr"
says "--host host-a:2 -n 2" "$work/stderr"
same_weights "$work/whole" "$work/lost"
await 10 gone "--save $work/saved" || fail "$what: left $(pgrep -af -- "--save $work/saved")"
finish
