#!/bin/sh
# Compiles the CPU kernels for ARM and runs them, under qemu if this machine is not ARM. It needs a C++ compiler for ARM
# and qemu-user (Debian: g++-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user).
set -eu

CXX=${CXX:-aarch64-linux-gnu-g++}
RUN=${RUN:-qemu-aarch64}
SOURCES=worker_service/quire_cpu/csrc
MADE=$(mktemp -d)
trap 'rm -rf "$MADE"' EXIT

"$CXX" -std=c++17 -O3 -fno-exceptions -fno-rtti -fno-math-errno -static -I"$SOURCES" -DQUIRE_ISA=baseline \
    "$SOURCES/kernels.cpp" "$SOURCES/decoder.cpp" "$SOURCES/dispatch.cpp" tests/worker/neon/check.cpp -o "$MADE/check"
$RUN "$MADE/check"
