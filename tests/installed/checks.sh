# What an operator does with the service and expects of it. Runs in the systemd of boot.sh, after README's installation.
# Each line of output that begins with "FAILED" is one; the exit status says whether there is any.

set -o pipefail
failed=0
check() { # WHAT COMMAND...: the command must succeed
    local what=$1
    shift
    if "$@" >/tmp/said 2>&1; then
        echo "holds: $what"
    else
        echo "FAILED: $what: $* (exit status $?)"
        sed 's/^/    /' /tmp/said
        failed=1
    fi
}
says() { grep -qF -- "$1" /tmp/last; } # the last answer contains this text
answer() { llmctl "$@" 2>&1 | tee /tmp/last; }
as() { # USER-ID GROUP-IDS COMMAND...
    setpriv --reuid "$1" --regid "$1" --groups "$2" -- "${@:3}" 2>&1 | tee /tmp/last
}
refused() { # a user outside the group, with llmctl's exit code 3 and an advice that names the group
    as 4242 4242 llmctl "$@"
    [[ $? == 3 ]] && says "Permission denied" && says llmd-clients
}
main_pid() { systemctl show --property=MainPID --value llmd.service; }
state_is() { [[ $(systemctl is-active "$1") == "$2" ]]; }
journal() { journalctl --sync && journalctl --unit=llmd.service "$@"; }

# A small cache starts faster; that nothing else is set from outside is as on any machine.
systemctl set-environment LLMD_KV_MEMORY=32MiB

# The socket starts the service.
check "no connection, no service" state_is llmd.service inactive
check "the first connection is answered" answer generate --raw "the hidden word is xyzzyplugh" --max-tokens 8
check "and has started the service" state_is llmd.service active
check "its status is told" bash -c 'systemctl status llmd.service | grep -F "Status: \"ready\""'
check "it runs as a user of its own" bash -c "(( \$(stat -c %u /proc/$(main_pid)) >= 61184 ))"
check "it waits at no boot for a network" bash -c '! systemctl show --property=After llmd.service | grep -q network'

# The journal: entries with fields, and no prompts.
check "journal entries have fields" bash -c 'journalctl --sync; journalctl -o json -u llmd.service SYSLOG_IDENTIFIER=llmd | grep -F "\"TARGET\":\"llmd"'
check "no prompt is in the journal" bash -c '! journalctl -o json --all | grep -F xyzzyplugh'

# Who may connect.
clients=$(getent group llmd-clients | cut -d: -f3)
check "a member of the group asks" as 4243 "$clients" llmctl status
check "a member of the group generates" as 4243 "$clients" llmctl generate --raw "a b c" --max-tokens 4
check "a stranger may not ask" refused status
check "a stranger may not generate" refused generate hello

# Stopping lets requests end; a connection starts it again.
llmctl generate --raw "a b c" --max-tokens 1500 --ignore-eos --json >/tmp/long 2>&1 &
long=$!
until llmctl status --json | grep -q '"running":1'; do
    kill -0 $long 2>/dev/null || break
done
check "stop" systemctl stop llmd.service
check "what ran was finished" wait $long
check "with all its tokens" grep -F '"output_tokens":1500' /tmp/long
check "and the service ended well" bash -c '[[ $(systemctl show --property=Result --value llmd.service) == success ]]'
check "the sockets stay" test -S /run/llmd/llmd.sock -a -S /run/llmd/control.sock
check "a connection starts it again" answer generate --raw "a b c" --max-tokens 4

# It comes back when it dies, and clients wait for it in the backlog.
before=$(main_pid)
check "kill -9" kill -9 "$before"
check "an answer all the same" answer generate --raw "a b c" --max-tokens 4
check "from another process" test "$(main_pid)" != "$before"
check "restart" systemctl restart llmd.service
check "ready again" answer status

# Metrics.
check "enable the metrics" systemctl enable llmd-metrics.socket
check "and restart" systemctl restart llmd.service
scrape() {
    exec 3<>/dev/tcp/127.0.0.1/9400 && printf 'GET /metrics HTTP/1.0\r\n\r\n' >&3 && grep -q '^llmd_steps_total' <&3
}
ip link set lo up 2>/dev/null
check "Prometheus can read them" scrape

# A configuration that is wrong is told where operators look, and mended without touching the sockets.
sed -i 's/^model = .*/model = "\/nowhere.gguf"/' /etc/llmd/llmd.toml
check "a missing model fails" bash -c '! systemctl restart llmd.service'
check "and the journal says it" bash -c 'journalctl --sync; journalctl -u llmd.service | grep -F "/nowhere.gguf"'
sed -i 's/^model = .*/model = "\/var\/lib\/llmd\/model.gguf"/' /etc/llmd/llmd.toml
check "a mended configuration is taken at the next try" answer generate --raw "a b c" --max-tokens 4
check "the sockets have outlived it" state_is llmd.socket active

# Taking the sockets away takes the service away.
check "stop all" systemctl stop llmd.socket llmd-control.socket
check "no socket is left" bash -c '! ls /run/llmd/*.sock'
check "and no service" state_is llmd.service inactive
answer status
check "which is told with exit code 3" test $? = 3
exit $failed
