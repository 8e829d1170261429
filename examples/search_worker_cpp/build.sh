#!/bin/sh
# Builds ./worker (Debian: apt-get install g++ pkg-config libgrpc++-dev libssl-dev protobuf-compiler).
set -e
cd "$(dirname "$0")"
out=${1:-.}
protoc --proto_path=../../protos --cpp_out="$out" courier/v1/courier.proto search/v1/search.proto
g++ -std=c++17 -O1 -I"$out" worker.cc "$out"/courier/v1/courier.pb.cc "$out"/search/v1/search.pb.cc \
  -o "$out/worker" $(pkg-config --cflags --libs grpc++ protobuf libcrypto)
