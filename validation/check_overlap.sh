#!/usr/bin/env bash
# What overlapping hides when bytes take time on a wire: two CPU ranks that talk over TCP through a loopback held to RATE, in a
# network namespace of their own (root; needs tc and unshare). On one host without that, ranks copy memory, which costs the
# processor what it costs the wire, and there is next to nothing to hide.
#   validation/check_overlap.sh [WEFT] [RATE] [JSON]
set -euo pipefail
cd "$(dirname "$0")/.."
weft=${1:-build/weft} rate=${2:-8gbit} json=${3:-}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cat > "$folder/deck.toml" <<'DECK'
[run]
threads = 1
[data]
path = "synthetic:clips=32,frames=4,height=16,width=16,latent=1"
[model]
hidden_size = 384
depth = 6
num_heads = 6
caption_channels = 256
model_max_length = 16
[train]
steps = 1000
batch_size = 2
micro_batches = 1
[parallel]
bucket_mib = 4
DECK
export OMP_NUM_THREADS=1 OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1
# Each rank as if it were alone on its host: no shared memory, neither weft's nor MPI's.
export WEFT_COMM_NODE_RANKS=1 OMPI_MCA_btl=tcp,self OMPI_MCA_btl_tcp_if_include=lo OMPI_MCA_pml=ob1
unshare -n bash -c '
  ip link set lo up
  tc qdisc add dev lo root tbf rate "$1" burst 1mb limit 64mb
  shift
  exec "$@"' -- "$rate" \
  mpirun --oversubscribe --bind-to none -n 2 "$weft" bench scaling "$folder/deck.toml" --ranks 1,2 --mode weak \
  --mix uniform --no-overlap --rounds 2 --steps 4 ${json:+--json "$json"}
