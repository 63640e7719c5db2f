#!/usr/bin/env bash
# Builds the fuzz targets with coverage, as cargo-fuzz would, without having it: fuzz/build.sh [cargo's arguments].
# No sanitizer but rustc's own checks: what is fuzzed has no `unsafe`.
set -euo pipefail
cd "$(dirname "$0")"
flags=(
    --cfg fuzzing -Ccodegen-units=1 -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-trace-compares
)
RUSTFLAGS="${flags[*]}" cargo +nightly build --release --target x86_64-unknown-linux-gnu "$@"
