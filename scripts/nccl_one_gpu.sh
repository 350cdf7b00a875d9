#!/usr/bin/env bash
# Ranks over NCCL that share one GPU: nccl_one_gpu.sh -n RANKS PROGRAM [ARGUMENT]...
#
# For correctness on one GPU: NCCL refuses to use a GPU for two ranks of a host, so each process
# gets a host name of its own (NCCL_HOSTID), and they communicate through sockets of the loopback
# device. Times are meaningless. Programs that count GPUs need --share-device as well. Sets the
# variables of torchrun (RANK, WORLD_SIZE, ...); ends once all processes have, with the exit code of
# the first that failed.
set -euo pipefail
usage() {
  echo "nccl_one_gpu: $1; usage: nccl_one_gpu.sh -n RANKS PROGRAM [ARGUMENT]..." >&2
  exit 2
}
[[ ${1:-} == -n ]] || usage "no -n"
ranks=${2:-}
[[ $ranks =~ ^[1-9][0-9]?$ ]] || usage "'$ranks' ranks, expected 1 to 99"
shift 2
(($# > 0)) || usage "no program"

export NCCL_SOCKET_IFNAME="=lo" NCCL_SOCKET_FAMILY=AF_INET NCCL_NET=Socket NCCL_IB_DISABLE=1
# Direct access to a neighbour's memory, which two ranks on the same GPU do not have.
export NCCL_P2P_DISABLE=1 NCCL_SHM_DISABLE=1 NCCL_CUMEM_HOST_ENABLE=0 NCCL_MNNVL_ENABLE=0 NCCL_NVLS_ENABLE=0
export NCCL_GIN_ENABLE=0 NCCL_RAS_ENABLE=0
# Kernels of several ranks wait for each other on one GPU: few and small blocks, so that all are
# resident. (Programs load their code at the start: PrepareForNccl in comm/nccl/nccl_world.h.)
export NCCL_PROTO=Simple NCCL_MAX_CTAS=2 NCCL_BUFFSIZE=1048576

free_port() { # two consecutive ports: ranks meet at the second
  local port
  for ((i = 0; i < 100; ++i)); do
    port=$((20000 + RANDOM % 20000))
    for p in $port $((port + 1)); do
      (exec 3<>"/dev/tcp/127.0.0.1/$p") 2>/dev/null && continue 2
    done
    echo $port
    return
  done
  echo "nccl_one_gpu: no free port" >&2
  exit 1
}
MASTER_PORT=$(free_port)
MOE_NCCL_SECRET=${MOE_NCCL_SECRET:-$(od -An -tx1 -N16 /dev/urandom | tr -d ' \n')}
export MASTER_ADDR=127.0.0.1 MASTER_PORT MOE_NCCL_SECRET
export WORLD_SIZE=$ranks LOCAL_WORLD_SIZE=$ranks

pids=()
trap 'kill "${pids[@]}" 2>/dev/null || true' INT TERM
for ((rank = 0; rank < ranks; ++rank)); do
  NCCL_HOSTID="rank$rank" RANK=$rank LOCAL_RANK=$rank "$@" &
  pids+=($!)
done
code=0
for _ in "${pids[@]}"; do # in the order in which they end
  rc=0
  wait -n || rc=$?
  ((code != 0)) || code=$rc
done
exit "$code"
