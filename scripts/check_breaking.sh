#!/usr/bin/env bash
# Fails if protos/ breaks a client that was built against those of the main branch.
#
# Usage: check_breaking.sh BUF, the path of the buf command.
set -euo pipefail
cd "$(dirname "$0")/.."
buf=$1

# A clone with a detached head may have no such branch.
branch=main
git rev-parse --quiet --verify refs/heads/main >/dev/null || branch=HEAD
if ! git cat-file -e "$branch:protos/buf.yaml" 2>/dev/null; then
  echo "No protos are committed at $branch yet, so there is nothing that they could break."
  exit 0
fi
"$buf" breaking protos --against ".git#ref=$branch,subdir=protos"
echo "protos/ breaks no client of $branch."
