# Sourced after lib.sh by what runs ranks on several hosts, which are namespaces of this one: each
# has processes, names and a boot id of its own.
apart=(unshare --pid --uts --mount --mount-proc --fork)
# Ranks of two process namespaces cannot read each other's memory as ranks of one host do.
export OMPI_MCA_btl=self,tcp OMPI_MCA_hwloc_base_binding_policy=none

namespaces_allowed() { "${apart[@]}" mount --bind "$moe" "$moe" 2>"$work/stderr"; }

# start_host <name>: the id of its first process, which reaps the others, is in $work/hosts/<name>.
start_host() {
  mkdir -p "$work/hosts"
  cat /proc/sys/kernel/random/uuid >"$work/boot_id_$1"
  rm -f "$work/up_$1"
  "${apart[@]}" sh -c "hostname $1 && mount --bind '$work/boot_id_$1' /proc/sys/kernel/random/boot_id &&
    touch '$work/up_$1' && while :; do sleep 1; done" >/dev/null 2>&1 </dev/null &
  await 10 test -e "$work/up_$1"
  pgrep -P $! >"$work/hosts/$1"
}
end_hosts() { cat "$work"/hosts/* 2>/dev/null | xargs -r kill -9 2>/dev/null; }
trap 'end_hosts; rm -rf "$work"' EXIT

# The shell by which launchers start daemons on a host: $work/rsh <name> <command>.
cat >"$work/rsh" <<'RSH'
#!/usr/bin/env bash
exec nsenter --target "$(cat "$(dirname "$0")/hosts/$1")" --pid --uts --mount sh -c "${*:2}"
RSH
chmod +x "$work/rsh"
