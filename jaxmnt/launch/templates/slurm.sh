#!/usr/bin/env bash
@options@

# Starts the run on @nodes@ of the allocation's nodes, again without a node that has failed, and asks Slurm for another
# allocation when that cannot be done here or the time is over. What to do is decided by jaxmnt.launch.inside.
set -o pipefail
cd @directory@ || exit 1

run_dir=@run_dir@
config=@frozen@  # as it was when the job was submitted
[ -f "$config" ] || config=@config@
arguments=(--config "$config" @arguments@)
container=(@container@)
spare_nodes=@spare_nodes@
@sweep@
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

# With --no-kill, which spare nodes need, Slurm lets an allocation go on that has lost this script with its node. Then
# another node gives it back.
guard() {
    other=$(tr ' ' '\n' <<<"$usable" | grep -vx "$SLURMD_NODENAME" | head -n 1)
    # shellcheck disable=SC2016
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$other" --quiet bash -c '
        while sleep 10; do
            scontrol show node "$1" | grep -E "State=[^ ]*DOWN" >/dev/null && scontrol requeue "$2" && break
        done' - "$SLURMD_NODENAME" "$job" >/dev/null 2>&1 &
    guard=$!
}
job=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_}${SLURM_ARRAY_TASK_ID:-$SLURM_JOB_ID}

cancelled=no
trap 'cancelled=yes' TERM  # scancel and preemption tell the tasks as well: they save and stop

start=0
while :; do
    usable=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | while read -r node; do
        scontrol show node "$node" | grep -E 'State=[^ ]*(DOWN|FAIL|NOT_RESPONDING|[*])' >/dev/null || printf '%s ' "$node"
    done)
    for _ in 1 2 3; do
        read -r action nodes <<<"$(decide before --run-dir "$run_dir" --wanted @nodes@ --usable "$usable")"
        [ -z "$action" ] || break
        sleep 10
    done
    if [ -z "$action" ] && [ "${SLURM_RESTART_COUNT:-0}" = 0 ]; then
        echo "jaxmnt: nothing can be decided here: see the lines above"
        exit 1
    fi
    if [ "$action" = start ]; then
        [ "$spare_nodes" = 0 ] || kill -0 "${guard:-none}" 2>/dev/null || guard
        began=$(date +%s.%N)
        # Each task's own exit code counts: one that ends lets the others end by themselves, and say who did not come.
        srun --nodes=@nodes@ --ntasks=@nodes@ --ntasks-per-node=1 --nodelist="$nodes" --overlap --kill-on-bad-exit=0 \
            --wait=@wait@ --cpu-bind=none --label@srun_options@ "${container[@]}" \
            bash -c "$(declare -f prepare); prepare; exec @python@ -m jaxmnt.train \"\$@\"" - "${arguments[@]}" &
        step=$!
        wait "$step"; code=$?
        while kill -0 "$step" 2>/dev/null; do wait "$step"; code=$?; done  # a trap ends a wait
        read -r action why <<<"$(decide after --run-dir "$run_dir" --code "$code" --began "$began" --nodes "$nodes" \
            --start "$start" --restarts @restarts@ --cancelled "$cancelled" --job "$SLURM_JOB_ID")"
        echo "jaxmnt: start $start on $nodes ended with exit code $code: $action${why:+, $why}"
    else
        code=4
        echo "jaxmnt: ${nodes:-no answer}; ${action:-requeue}"
    fi
    # Without an answer (a file system that is away) what can be done is done: a stop that was asked for is no end.
    if [ -z "$action" ] && [ "$cancelled" = no ] && [ "$code" != 0 ] && [ "$code" != 2 ]; then
        [ "${SLURM_RESTART_COUNT:-0}" -ge 20 ] || action=requeue
    fi
    case $action in
        start | again) start=$((start + 1)) ;;
        requeue)
            [ "${SLURM_RESTART_COUNT:-0}" -lt @requeues@ ] || { echo "jaxmnt: requeued often enough"; exit "$code"; }
            for _ in {1..20}; do
                [ "$cancelled" = no ] || break
                scontrol requeue "$job" && sleep 300
                sleep 15
            done
            exit 75 ;;
        *) exit "$code" ;;
    esac
done
