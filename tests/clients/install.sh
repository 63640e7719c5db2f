#!/usr/bin/env bash
# Installs the coding clients of tests/clients at pinned versions, from npm and PyPI only.
#
# usage: install.sh [--all] [FOLDER]
#
# FOLDER (default target/clients) gets everything: packages, virtual environments, logs. What is there at the right
# version stays. Without --all: what CI runs. LEGO_CLIENTS="pi codex" names a few. A client that cannot be installed is
# an error; nothing is skipped.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
here=$root/tests/clients
set_name=ci
folder=$root/target/clients
for argument in "$@"; do
    case $argument in
        --all) set_name=all ;;
        -*) echo "install.sh: unknown option $argument" >&2; exit 2 ;;
        *) folder=$argument ;;
    esac
done
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
mkdir -p "$folder/logs" "$folder/stamps"
export npm_config_cache=$folder/npm-cache npm_config_fund=false npm_config_audit=false
export npm_config_update_notifier=false PIP_DISABLE_PIP_VERSION_CHECK=1

# npm's packages pin only what they are themselves; what they need is taken as of this day.
before=2026-11-30
failed=()

# done_before NAME WHAT: whether NAME was installed as WHAT.
done_before() {
    [ "$(cat "$folder/stamps/$1" 2>/dev/null)" = "$2" ]
}

# report NAME WHAT STATUS SECONDS
report() {
    if [ "$3" = 0 ]; then
        echo "$2" > "$folder/stamps/$1"
        printf '%-18s installed in %s s\n' "$1" "$4"
    else
        failed+=("$1")
        printf '%-18s FAILED, see %s\n' "$1" "$folder/logs/$1.log"
        tail -n 15 "$folder/logs/$1.log" | sed 's/^/    /'
    fi
}

# again COMMAND...: up to three times, for a registry that is out of breath.
again() {
    local try
    for try in 1 2 3; do
        if "$@"; then return; fi
        echo "attempt $try failed"
        sleep 5
    done
    return 1
}

# npm_client NAME VERSION_COMMAND VERSION [npm options and packages]...
# Runs VERSION_COMMAND in the new folder; its output must have VERSION in it.
npm_client() {
    local name=$1 check=$2 version=$3 status=0 start=$SECONDS
    shift 3
    local what="$* before $before"
    if done_before "$name" "$what"; then return; fi
    rm -rf "${folder:?}/$name" "$folder/stamps/$name"
    mkdir -p "$folder/$name"
    {
        echo '{"private": true}' > "$folder/$name/package.json" &&
            again npm install --prefix "$folder/$name" --before="$before" "$@" &&
            (cd "$folder/$name" && HOME=$folder/$name sh -c "$check" </dev/null) | tee /dev/stderr | grep -qF "$version"
    } >"$folder/logs/$name.log" 2>&1 || status=$?
    report "$name" "$what" "$status" $((SECONDS - start))
}

# venv_client NAME PYTHON LIST: a virtual environment with what the list locks.
venv_client() {
    local name=$1 python=$2 list=$3 status=0 start=$SECONDS
    local what
    what="$python $(sha256sum < "$list")"
    if done_before "$name" "$what"; then return; fi
    rm -rf "${folder:?}/$name" "$folder/stamps/$name"
    {
        "$python" -m venv "$folder/$name" &&
            again "$folder/$name/bin/pip" install --no-cache-dir --requirement "$list"
    } >"$folder/logs/$name.log" 2>&1 || status=$?
    report "$name" "$what" "$status" $((SECONDS - start))
}

# python_at_least MINOR: the path of a Python 3 of at least that minor version.
python_at_least() {
    local candidate
    for candidate in python3 python3.12 python3.13 python3.14 "$HOME"/.pyenv/versions/3.*/bin/python3; do
        if "$candidate" -c "import sys, venv, ensurepip; sys.exit(sys.version_info < (3, $1))" 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "install.sh: no Python of at least 3.$1 with venv is on this machine" >&2
    return 1
}

# wants NAME: whether this set has the client; LEGO_CLIENTS may name a few.
wants() {
    [ -z "${LEGO_CLIENTS:-}" ] || [[ " $LEGO_CLIENTS " == *" $1 "* ]]
}

if ! node -e 'process.exit(process.versions.node.split(".")[0] < 20 ? 1 : 0)' 2>/dev/null; then
    echo "install.sh: node 20 or newer is missing" >&2
    exit 1
fi
plain_python=$(python_at_least 10)

# The native clients check their own version; pi needs no install scripts.
if wants pi; then
    npm_client pi 'node_modules/.bin/pi --version 2>&1' 0.73.1 --ignore-scripts @mariozechner/pi-coding-agent@0.73.1
fi
if wants codex; then npm_client codex 'node_modules/.bin/codex --version' 0.171.0 @openai/codex@0.171.0; fi
if wants claude-code; then
    npm_client claude-code 'node_modules/.bin/claude --version' 2.1.332 @anthropic-ai/claude-code@2.1.332
fi
if wants sdk-js; then
    npm_client sdk-js 'cat node_modules/openai/package.json' '"version": "6.49.0"' \
        openai@6.49.0 @anthropic-ai/sdk@1.14.0
fi
if wants sdk-py; then venv_client sdk-py "$plain_python" "$here/locks/sdk-py.txt"; fi
if wants mini-swe-agent; then venv_client mini-swe-agent "$plain_python" "$here/locks/mini-swe-agent.txt"; fi

if [ "$set_name" = all ]; then
    if wants opencode; then npm_client opencode 'node_modules/.bin/opencode --version' 1.18.33 opencode-ai@1.18.33; fi
    # On an older node npm picks an old version by its engines, and the new one does not run: it brings its own node.
    if wants qwen-code; then
        npm_client qwen-code 'PATH=$PWD/node_modules/.bin:$PATH node_modules/.bin/qwen --version' 0.24.4 \
            node@22.23.3 @qwen-code/qwen-code@0.24.4
    fi
    if wants openhands || wants terminus-2; then new_python=$(python_at_least 12); fi
    if wants openhands; then venv_client openhands "$new_python" "$here/locks/openhands.txt"; fi
    if wants terminus-2; then venv_client terminus-2 "$new_python" "$here/locks/terminus-2.txt"; fi
    for program in tmux git; do
        command -v "$program" >/dev/null || failed+=("$program (a system package)")
    done
fi

rm -rf "${folder:?}/npm-cache"
if [ ${#failed[@]} -gt 0 ]; then
    printf 'install.sh: not installed: %s\n' "${failed[*]}" >&2
    exit 1
fi
