#!/bin/bash
# A cluster of the nodes of one Slurm job, and a run on it:
#
#     sbatch examples/slurm/two_nodes.sh recipes/cluster/two_nodes.yaml
#
# More words are keys, as for `luyen train`. Sent twice, the job goes on from its newest checkpoint.
#SBATCH --job-name=luyen
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@600
#SBATCH --requeue
set -euo pipefail

port=6379
head=$(hostname --ip-address | awk '{print $1}')
export RAY_ADDRESS="$head:$port"
others=$((SLURM_NNODES - 1))

# This script runs on the first node, which becomes the head.
ray start --head --node-ip-address="$head" --port="$port" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE"
trap 'ray stop' EXIT
if ((others > 0)); then
    srun --nodes="$others" --ntasks="$others" --exclude="$(hostname)" \
        ray start --address="$RAY_ADDRESS" --block \
        --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$SLURM_GPUS_ON_NODE" &
fi

# A run counts the devices once, at its start: wait until every node has joined.
count='import ray; ray.init(address="auto", log_to_driver=False); print(len(ray.nodes()))'
until [[ $(python -c "$count" 2> /dev/null) -ge $SLURM_NNODES ]]; do
    sleep 2
done

# Slurm warns ten minutes before the time is over; the run then saves and ends.
luyen train "$@" trainer.nnodes="$SLURM_NNODES" trainer.n_gpus_per_node="$SLURM_GPUS_ON_NODE" &
run=$!
trap 'kill -TERM "$run"' TERM
status=0
wait "$run" || status=$?
if kill -0 "$run" 2> /dev/null; then # the signal ended the first wait
    status=0
    wait "$run" || status=$?
fi
exit "$status"
