#!/usr/bin/env bash
@options@

# Starts the run on @nodes@ of the allocation's nodes, again without a node that has failed, and asks Slurm for another
# allocation when that cannot be done here or the time is over. What to do is decided by jaxmnt.launch.inside.
# The job is requeued @requeues@ times at most, and in each allocation the run is started again @restart_limit@.
@limit@set -o pipefail
cd @directory@ || exit 1

run_dir=@run_dir@
config=@frozen@  # as it was when the job was submitted
[ -f "$config" ] || config=@config@
arguments=(--config "$config" @arguments@)
container=(@container@)
spare_nodes=@spare_nodes@
@sweep@
# By it the processes know each other: new in each allocation, and in no file.
JAXMNT_RUN_KEY=$(od -An -vtx1 -N32 /dev/urandom | tr -d ' \n')
export JAXMNT_RUN_KEY

# shellcheck disable=SC1091
prepare() {
@setup@
}

decide() {  # what to do: a word, and nodes
    if [ "${#container[@]}" -gt 0 ]; then
        srun --overlap --nodes=1 --ntasks=1 --nodelist="$SLURMD_NODENAME" "${container[@]}" \
            bash -c "$(declare -f prepare); prepare >&2; exec @python@ -m jaxmnt.launch.inside \"\$@\"" - "$@"
    else
        (prepare >&2; exec @python@ -m jaxmnt.launch.inside "$@")
    fi
}

ask() {  # $answer is what was decided, or nothing if that cannot be done now
    for _ in 1 2 3; do
        answer=$(decide "$@")
        [ -z "$answer" ] || break
        sleep 10
    done
}

# With --no-kill, which spare nodes need, Slurm lets an allocation go on that has lost this script with its node. Then
# another node gives it back.
guard() {
    other=$(tr ' ' '\n' <<<"$usable" | grep -vx "$SLURMD_NODENAME" | head -n 1)
    # shellcheck disable=SC2016
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$other" --quiet bash -c '
        trap "" USR1  # the early warning goes to all steps
        while sleep 10; do
            scontrol show node "$1" | grep -E "^ *State=DOWN" >/dev/null && scontrol requeue "$2" && break
        done' - "$SLURMD_NODENAME" "$job" >/dev/null 2>&1 &
    guard=$!
}
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

# srun waits for the tasks of a lost node until Slurm notices, which takes minutes. A minute after a task has noted why
# it failed, the step is ended.
end_failed_step() {
    while sleep 15; do
        a_task_has_failed && sleep 60 && a_task_has_failed && kill -TERM "$step" && break
    done >/dev/null 2>&1
}
# One of this start, by the last line of its events. Their keys are in the order in which telemetry/events.py writes them.
a_task_has_failed() {
    find "$run_dir/events" -name '*.jsonl' -newer "$run_dir/launch/began" -exec tail -qn 1 {} + |
        grep -E "\"kind\": \"(failed|peer_lost|hang|start_failed|start_abandoned)\".*\"host\": \"(${nodes//,/|})[\".]"
}

cancelled=no
asked_to_end() {  # by scancel, by preemption or at the time limit; the tasks are told as well: they save and stop
    cancelled=yes
    # Slurm requeues no job that has come to its limit.
    scontrol show job "$job" | grep -F Reason=TimeLimit >/dev/null && scontrol requeue "$job"
}
trap asked_to_end TERM

start=0
while :; do
    usable='' drained=''
    for node in $(scontrol show hostnames "$SLURM_JOB_NODELIST"); do
        state=$(scontrol show node "$node" | grep -oE '^ *State=[^ ]*')
        [[ $state =~ =DOWN|FAIL|NOT_RESPONDING|[*] ]] && continue
        usable+="$node "
        [[ $state =~ DRAIN ]] && drained+="$node "  # somebody has doubts about it
    done
    ask before --run-dir "$run_dir" --wanted @nodes@ --usable "$usable" --drained "$drained"
    read -r action nodes <<<"$answer"
    if [ -z "$action" ] && [ "$start" = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
        echo "jaxmnt: nothing was started; fix the problem that the lines above name, then submit the job again"
        exit 1
    fi
    if [ "$action" = start ]; then
        [ "$spare_nodes" = 0 ] || kill -0 "${guard:-none}" 2>/dev/null || guard
        began=$(date +%s.%N)
        mkdir -p "$run_dir/launch" && : >"$run_dir/launch/began"
        # Each task's own exit code counts: one that ends lets the others end by themselves, and say who did not come.
        srun --nodes=@nodes@ --ntasks=@nodes@ --ntasks-per-node=1 --nodelist="$nodes" --overlap --kill-on-bad-exit=0 \
            --wait=@wait@ --cpu-bind=none --label@srun_options@ "${container[@]}" \
            bash -c "$(declare -f prepare); prepare; exec @python@ -m jaxmnt.train \"\$@\"" - "${arguments[@]}" &
        step=$!
        end_failed_step &
        end_failed_step=$!
        wait "$step"; code=$?
        while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a trap ends a wait
        kill "$end_failed_step" 2>/dev/null
        ask after --run-dir "$run_dir" --code "$code" --began "$began" --nodes "$nodes" --start "$start" \
            --restarts @restarts@ --cancelled "$cancelled" --job "$SLURM_JOB_ID" --spare-nodes "$spare_nodes"
        read -r action why <<<"$answer"
        echo "jaxmnt: start $start on $nodes ended with exit code $code; next: ${action:-no answer}${why:+ ($why)}"
    else
        code=4
        echo "jaxmnt: ${nodes:-no answer}; next: ${action:-requeue}"
    fi
    # Without an answer (a file system that is away) what can be done is done: a stop that was asked for is no end.
    if [ -z "$action" ] && [ "$cancelled" = no ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
        [ "${SLURM_RESTART_COUNT:-0}" -ge 100 ] || action=requeue
    fi
    case $action in
        start | again) start=$((start + 1)) ;;
        requeue)
            [ "${SLURM_RESTART_COUNT:-0}" -lt @requeues@ ] || {
                echo "jaxmnt: ends after @requeues@ requeues; find the cause in the lines above, then submit the job again"
                exit "$code"
            }
            for try in {1..240}; do  # a controller may be away for a while; what it refuses it will not allow later
                [ "$cancelled" = no ] || break
                scontrol requeue "$job" && sleep 300
                [ "$try" -lt 20 ] || ! scontrol ping | grep -F UP >/dev/null || break
                sleep 15
            done
            exit 75 ;;
        *) exit "$code" ;;
    esac
done
