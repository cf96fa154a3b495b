#!/usr/bin/env bash
# Builds examples/typescript in build/typescript: packages from npm, generated code of protos/, JavaScript in dist/.
# Exit status 3 means that node, npm or the packages are unavailable; any other status but 0 is an error in the sources.
set -euo pipefail
cd "$(dirname "$0")/.."
source=examples/typescript
folder=build/typescript

if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    echo "node and npm are not installed"
    exit 3
fi
if [ "$(node -p 'process.versions.node.split(".")[0] >= 20')" != true ]; then
    echo "node $(node --version) is older than 20"
    exit 3
fi
mkdir -p "$folder"
rm -rf "$folder/src" "$folder/dist"
cp -R "$source"/{package.json,.npmrc,buf.gen.yaml,tsconfig.json,src} "$folder"
if ! cmp -s "$source/package-lock.json" "$folder/.installed"; then
    cp "$source/package-lock.json" "$folder"
    # No package needs to run an install script.
    if ! npm ci --silent --no-audit --no-fund --ignore-scripts --prefix "$folder"; then
        echo "npm could not install the packages of $source/package-lock.json"
        exit 3
    fi
    cp "$source/package-lock.json" "$folder/.installed"
fi
npm run --silent --prefix "$folder" build
