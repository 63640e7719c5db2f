#!/usr/bin/env bash
# All clients, those that CI leaves out too: installs them, has the SDKs read every fixture, then runs each
# client through lego with every fault, by the live relay and by the token-in relay.
#
# usage: all.sh [FOLDER]     LEGO=FILE names lego's binary, default target/debug/lego
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
root=$(cd "$here/../.." && pwd)
folder=${1:-$root/target/clients}
"$here/install.sh" --all "$folder"
status=0
"$here/fixtures.py" --lego "${LEGO:-$root/target/debug/lego}" --clients "$folder" || status=$?
run=("$here/run_client.py" --lego "${LEGO:-$root/target/debug/lego}" --clients "$folder")
echo "by the live relay"
"${run[@]}" all || status=$?
echo "by the token-in relay"
"${run[@]}" all --relay token_in || status=$?
echo "clients: $SECONDS s in all"
exit "$status"
