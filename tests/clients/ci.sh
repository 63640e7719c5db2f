#!/usr/bin/env bash
# The clients of CI: installs them, has the SDKs read every fixture, then runs each
# client through lego with every fault by the live relay, and by the token-in relay without
# a fault; there some clients, of each protocol, streamed and whole, with every fault too.
#
# usage: ci.sh [FOLDER]     LEGO=FILE names lego's binary, default target/debug/lego
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$root/target/clients}
"$here/install.sh" "$folder"
status=0
"$here/fixtures.py" --lego "${LEGO:-$root/target/debug/lego}" --clients "$folder" || status=$?
run=("$here/run_client.py" --lego "${LEGO:-$root/target/debug/lego}" --clients "$folder")
echo "by the live relay"
"${run[@]}" ci || status=$?
echo "by the token-in relay"
"${run[@]}" ci --relay token_in --fault none || status=$?
"${run[@]}" pi codex claude-code openai-py --relay token_in --fault 500_once --fault 429_once --fault drop_mid_stream || status=$?
echo "clients: $SECONDS s in all"
exit "$status"
