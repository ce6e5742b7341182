# Process 1 of a container has no default handlers: without this shell a SIGTERM would be lost until Python listens. It is
# handed on from the first moment; a process that it ends before it listens has nothing to lose, and is to be run again.
asked='' signals=0 process='' code=127
# shellcheck disable=SC2317  # the traps call it
hand_on() {
    asked=$1 signals=$((signals + 1))
    [ -z "$process" ] || kill -s "$1" "$process" 2>/dev/null
}
trap 'hand_on TERM' TERM INT HUP
trap 'hand_on USR1' USR1
run() {
@setup@
    exec @command@
}
run &
process=$!
[ -z "$asked" ] || kill -s "$asked" "$process" 2>/dev/null
heard=none
while [ "$heard" != "$signals" ]; do  # a trap ends a wait
    heard=$signals
    wait "$process"
    ended=$?
    [ "$ended" = 127 ] || code=$ended  # it is no child any more
done
case $signals:$code in 0:*) ;; *:143 | *:138) code=75 ;; esac
exit "$code"
