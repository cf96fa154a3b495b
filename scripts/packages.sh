#!/bin/sh
# Makes build/peers/packages, an environment with packages for agents. tests/gateway/test_clients.py runs them against
# the gateway. They need their own environment, because they pin releases of openai and pydantic. uv installs them, because
# pip's resolver takes minutes. To update them:
# uv pip compile --no-annotate --no-header -o tests/gateway/packages/requirements.txt tests/gateway/packages/requirements.in
set -eu

PYTHON=${PYTHON:-.venv/bin/python}
FOLDER=${FOLDER:-build/peers/packages}

trap '[ $? -eq 0 ] || rm -rf "$FOLDER"' EXIT  # An incomplete environment would look complete.
"$PYTHON" -m venv --clear "$FOLDER"
"$FOLDER/bin/pip" install --quiet --disable-pip-version-check "$(grep '^uv==' constraints.txt)"
"$FOLDER/bin/uv" pip install --quiet --python "$FOLDER/bin/python" -r tests/gateway/packages/requirements.txt
