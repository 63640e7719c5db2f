#!/usr/bin/env bash
# Fuzzes one target: fuzz/run.sh TARGET [seconds [libFuzzer's flags]]. It begins with the committed corpus and the
# fixtures; what it finds is in fuzz/target/live/TARGET, an input that fails in fuzz/artifacts/TARGET.
set -euo pipefail
cd "$(dirname "$0")"
target=$1 seconds=${2:-600}
shift "$(($# > 1 ? 2 : 1))"
./build.sh --quiet --bin "$target"
./seed.sh target/seeds
mkdir -p "target/live/$target" "artifacts/$target"
exec "target/x86_64-unknown-linux-gnu/release/$target" "target/live/$target" "corpus/$target" "target/seeds/$target" \
    -max_len=6000 -dict=protocol.dict -max_total_time="$seconds" -timeout=20 -print_final_stats=1 \
    -artifact_prefix="artifacts/$target/" "$@"
