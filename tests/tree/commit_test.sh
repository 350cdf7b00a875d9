#!/usr/bin/env bash
# cmake/commit.cmake on checkouts with known states. Run: commit_test.sh <commit.cmake>
set -euo pipefail
command -v git >/dev/null || exit 77
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_SYSTEM=/dev/null GIT_CEILING_DIRECTORIES=$work
mkdir "$work/plain" "$work/tree"
git() { command git -C "$work/tree" -c user.name=test -c user.email=test "$@" >"$work/said"; }
says() { # <root> <commit>
  cmake -DROOT="$1" -DOUTPUT="$work/commit.h" -P "$script"
  [[ $(cat "$work/commit.h") == "#define MOE_COMMIT \"$2\"" ]] || {
    echo "FAILED: $1: $(cat "$work/commit.h"), expected $2"
    exit 1
  }
}
script=$1
says "$work/plain" unknown
git init -q -b main
says "$work/tree" unknown # no commit yet
mkdir "$work/tree/folder"
echo 1 >"$work/tree/folder/file"
git add .
git commit -m one
git rev-parse --short=12 HEAD
hash=$(cat "$work/said")
says "$work/tree" "$hash"
says "$work/tree/folder" unknown # inside another project's checkout
touch -d 2001-01-01 "$work/commit.h" "$work/old"
echo new >"$work/tree/untracked"
says "$work/tree/folder" unknown
[[ ! $work/commit.h -nt $work/old ]] || { echo "FAILED: the same commit was written again"; exit 1; }
says "$work/tree" "$hash"
echo 2 >"$work/tree/folder/file"
says "$work/tree" "$hash+"
echo "all passed"
