"""Runs the features of a package against the gateway: `python run.py MODULE ADDRESS ADDRESS`, in the packages'
environment.

Each output line is a JSON list: a feature's name, and its traceback or null.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback

module = importlib.import_module(sys.argv[1])
for name, feature in list(vars(module).items()):
    if getattr(feature, "__module__", "") == module.__name__ and callable(feature) and not name.startswith("_"):
        failure = None
        try:
            feature()
        except Exception:  # The caller reports every failure.
            failure = traceback.format_exc()
        print(json.dumps([name, failure]), flush=True)
