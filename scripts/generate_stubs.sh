#!/usr/bin/env bash
# Generates specdec/v1 from protos/. With --check it writes nothing, and fails if what is there
# differs from what would be generated.
#
# Usage: generate_stubs.sh BIN_DIR [--check], where BIN_DIR has what protos/requirements.txt lists.
set -euo pipefail
cd "$(dirname "$0")/.."
bin=$1
check=${2:-}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

protoc() {
  "$bin/python" -m grpc_tools.protoc --proto_path=protos \
    --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" \
    --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" "$@"
}

cd protos
# shellcheck disable=SC2207 # The names have no spaces, and bash 3 has no mapfile.
messages=($(find specdec -name '*.proto' | LC_ALL=C sort))
# shellcheck disable=SC2207
services=($(grep -lE '^service ' "${messages[@]}"))
cd ..
protoc --python_out="$out" --mypy_out=quiet:"$out" "${messages[@]}"
# The services are asyncio only, on both sides, so that their types need no unions.
protoc --grpc_python_out="$out" --mypy_grpc_out=quiet,only_async:"$out" "${services[@]}"

if [[ $check == --check ]]; then
  diff -r --brief --exclude=__init__.py --exclude=__pycache__ specdec/v1 "$out/specdec/v1" || {
    echo "specdec/v1 differs from what protos/ generates: run 'make protos'." >&2
    exit 1
  }
  echo "specdec/v1 is what protos/ generates."
else
  rm -f specdec/v1/*_pb2*.py specdec/v1/*_pb2*.pyi
  cp "$out"/specdec/v1/* specdec/v1/
fi
