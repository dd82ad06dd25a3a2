# Who is told that the job is about to end differs, so the run, which may get SIGTERM only once, gets it thus:
# - USR1 comes to this shell alone, grace_s before the time limit, or on a pre-emption (preempt_send_user_signal).
# - USR2 comes to this shell alone, from `agentrl jobs stop`.
# - HUP comes from the watch below: of a pre-emption with a GraceTime Slurm tells the steps of a job and not its script.
# - TERM comes to all processes, the run among them: scancel, or a pre-emption without notice. SIGKILL follows.
asked_by=''
end() { kill -KILL "${helpers[@]}" 2>/dev/null; }
ask() {
    local was=$asked_by
    if [ "$1" = person ] || [ -z "$was" ]; then asked_by=$1; fi
    [ -z "$was" ] || return 0
    [ "$1" = slurm ] || [ -z "$run" ] || kill -TERM "$run"
    { sleep "$grace_s"; kill -KILL "$run"; } >/dev/null 2>&1 &
    helpers+=("$!")
}
run=''
trap end EXIT
trap 'ask limit' USR1
trap 'ask person' USR2
trap 'ask preemption' HUP
trap 'ask slurm' TERM

if [ -z "$asked_by" ]; then
    "${command[@]}" &
    run=$!
    [ -z "$asked_by" ] || kill -TERM "$run" 2>/dev/null
    # The second keeps a TERM that comes to all processes from being told twice.
    { srun --nodes=1 --ntasks=1 --overlap --quiet sleep infinity; [ $? -ne 143 ] || { sleep 1; kill -HUP $$; }; } \
        >/dev/null 2>&1 &
    helpers+=("$!")
    # A signal that comes in the moment before `wait` is handled only behind it, so none waits for long.
    while kill -0 "$run" 2>/dev/null; do
        sleep 5 >/dev/null 2>&1 &
        wait -n "$run" "$!"
    done
    wait "$run"
    status=$?
else
    status=$parked
fi

if [ "$status" -eq "$parked" ] && [ "$requeue" -eq 1 ] && { [ "$asked_by" = limit ] || [ "$asked_by" = preemption ]; }; then
    echo "job $SLURM_JOB_ID is queued again: the run is parked, and goes on when it starts once more"
    scontrol requeue "$SLURM_JOB_ID" || echo "submit the recipe again: Slurm does not queue this job once more"
fi
exit "$status"
