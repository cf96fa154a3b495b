#!/usr/bin/env bash
# Lints protos/ with buf, and refuses breaking changes since the last tag; --against REF names another commit.
# npm installs buf into build/. Without npm the script says that it checks nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
version=1.75.0
folder=build/buf-$version
buf=$folder/node_modules/.bin/buf

not_run() {
    echo "not run: buf $1, because $2"
}

if [ ! -x "$buf" ]; then
    if ! command -v npm > /dev/null; then
        not_run "lint and buf breaking" "npm is not installed"
        exit 0
    fi
    # Each platform has its own package with the binary, so no package needs to run an install script.
    if ! npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" "@bufbuild/buf@$version"; then
        not_run "lint and buf breaking" "npm could not install @bufbuild/buf@$version"
        exit 0
    fi
fi

"$buf" lint
before=$(git describe --tags --abbrev=0 2> /dev/null || true)
[ "${1:-}" = --against ] && before=$2
if [ -z "$before" ]; then
    not_run breaking "no commit before this one has a tag"
    exit 0
fi
git archive "$before" buf.yaml protos | "$buf" breaking --against '-#format=tar'
