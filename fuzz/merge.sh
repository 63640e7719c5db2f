#!/usr/bin/env bash
# Puts into a target's corpus what its last run adds, small inputs only: fuzz/merge.sh TARGET
set -euo pipefail
cd "$(dirname "$0")"
mkdir -p "corpus/$1"
exec "target/x86_64-unknown-linux-gnu/release/$1" -merge=1 -use_counters=0 -max_len=512 "corpus/$1" "target/live/$1"
