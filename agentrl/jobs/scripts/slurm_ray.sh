# A Ray cluster of the job's nodes, this one its head. Signals of the job are for the run: without its nodes it could
# not park. It ends with the job.
name=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
host=$(getent ahostsv4 "$name" | awk '{ print $1; exit }')
export RAY_ADDRESS="$host:$((20000 + SLURM_JOB_ID % 20000))"
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN  # of this job alone; it reaches the nodes by srun
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | sha256sum | cut -c 1-64)
start=("$ray" start --block --disable-usage-stats "--num-cpus=$cpus" "--num-gpus=$gpus")
head=("${start[@]}" --head "--node-ip-address=$host" "--port=${RAY_ADDRESS##*:}" --include-dashboard=false)
env --block-signal=TERM --default-signal=INT -u RAY_ADDRESS "${head[@]}" "--temp-dir=/tmp/ray-$SLURM_JOB_ID" >/dev/null &
ray_head=$!
nodes_up() { "$ray" status 2>/dev/null | sed '/^Pending/,$d' | grep -c ' node_'; }
for _ in $(seq 60); do
    [ "$(nodes_up)" -lt 1 ] || break
    sleep 1
done
srun --nodes=$((nodes - 1)) --ntasks=$((nodes - 1)) --ntasks-per-node=1 --overlap --quiet "--exclude=$SLURMD_NODENAME" \
    env --block-signal=TERM -u RAY_ADDRESS "${start[@]}" "--address=$RAY_ADDRESS" >/dev/null &
ray_nodes=$!
for _ in $(seq 120); do
    [ "$(nodes_up)" -lt "$nodes" ] || break
    kill -0 "$ray_head" && kill -0 "$ray_nodes" || break
    sleep 1
done
helpers=("$ray_nodes")
end() {
    kill -KILL "${helpers[@]}" 2>/dev/null
    kill -INT "$ray_head" 2>/dev/null
    for _ in $(seq 40); do
        kill -0 "$ray_head" 2>/dev/null || break
        sleep 0.5
    done
}
[ "$(nodes_up)" -ge "$nodes" ] || { echo "Ray does not start on the $nodes nodes of the job"; end; exit 1; }
