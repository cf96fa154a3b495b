"""`python -m tests.fuzz.schema --count N --seed S`: sends requests that match `/openapi.json`, and some that do not, to
a real gateway and worker.

Needs schemathesis, which is not among the dependencies. A case fails if its answer is 500, ends more than 2 s after the
gateway's own deadline, or has an undescribed status, content type or form. The described form of a refusal is OpenAI's.
A failure is shrunk and printed with its curl command. The seed repeats the run.
"""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis import strategies as st
from quire.local import LocalStack
from quire_gateway.gate import OPERATOR_PATHS
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.client.servers import secret_file
from tests.gateway.scene import DEMO

TIMEOUT_S = 1.0  # the gateway's timeout for a request
LIMIT_S = TIMEOUT_S + 2.0
# Beginning of a path -> the request that creates an object whose id fits into the path.
MADE = {
    "/v1/branches/": ("/v1/branches", {"prompt": "A for statement", "ttl_s": 5}),
    "/v1/responses/": ("/v1/responses", {"input": "A for statement", "max_output_tokens": 2}),
}
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
STATUSES = frozenset({"200", "400", "404"})


class Fuzzed:
    """Sends requests to a gateway with a key, or as its operator.

    Attributes:
        seen: how often each status occurred.
    """

    def __init__(self, address: str, key: str, operator_token: str) -> None:
        self.url = f"http://{address}"
        self.headers = {"Authorization": f"Bearer {key}"}
        self.operator_headers = {"Authorization": f"Bearer {operator_token}"}
        self.seen = Counter[str]()

    def check(self, case: schemathesis.Case, is_made: bool) -> None:
        """Sends a request, and checks the answer.

        Raises:
            Exception: the answer is wrong.
        """
        path, body = next((made for start, made in MADE.items() if case.path.startswith(start)), ("", {}))
        if is_made and path:
            made = requests.post(self.url + path, json=body, headers=self.headers, timeout=60)
            if made.status_code == 200:
                case.path_parameters["identity"] = made.json()["id"]
        headers = self.operator_headers if case.path in OPERATOR_PATHS else self.headers
        started_s = time.monotonic()
        answer = case.call(base_url=self.url, headers=headers, timeout=60)
        seconds = time.monotonic() - started_s
        self.seen[str(answer.status_code)] += 1
        case.validate_response(answer, checks=CHECKS, headers=headers)
        assert answer.status_code != 500, f"{answer.text}\n{case.as_curl_command()}"
        assert seconds < LIMIT_S, f"the answer took {seconds:.1f} s\n{case.as_curl_command()}"

    def run(self, operation: Any, mode: GenerationMode, count: int, seed: int) -> None:
        """Sends cases of an operation.

        Raises:
            Exception: an answer is wrong.
        """
        checks = [hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much]
        checks += [hypothesis.HealthCheck.data_too_large, hypothesis.HealthCheck.large_base_example]

        @hypothesis.seed(seed)
        @hypothesis.settings(max_examples=count, deadline=None, database=None, suppress_health_check=checks)
        @hypothesis.given(case=operation.as_strategy(generation_mode=mode), is_made=st.booleans())
        def cases(case: schemathesis.Case, is_made: bool) -> None:
            self.check(case, is_made)

        cases()


def run(fuzzed: Fuzzed, count: int, seed: int) -> int:
    """Returns 1 if an answer was wrong, or a status was never seen."""
    schema = schemathesis.openapi.from_url(f"{fuzzed.url}/openapi.json", headers=fuzzed.headers)
    operations = [found.ok() for found in schema.get_all_operations()]
    modes = (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    each, failed, started_s = max(1, count // (len(operations) * len(modes))), list[str](), time.monotonic()
    for operation in operations:
        for mode in modes:
            try:
                fuzzed.run(operation, mode, each, seed)
            except hypothesis.errors.Unsatisfiable:
                # hypothesis finds no invalid request for an operation without parameters.
                continue
            except Exception:
                failed.append(f"{operation.label} ({mode.value})")
                traceback.print_exc()
    missing = sorted(STATUSES - set(fuzzed.seen))
    seconds = time.monotonic() - started_s
    print(f"requests {fuzzed.seen.total():,} of {len(operations)} operations, {seconds:.0f} s; seed {seed}")
    print(f"answers {dict(fuzzed.seen.most_common())}; statuses never seen: {missing or 'none'}")
    print(f"failed {failed or 'none'}")
    return 1 if failed or missing else 0


def main() -> int:
    """Parses the command line and runs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.schema", description=__doc__)
    parser.add_argument("--count", type=int, default=5_000, help="requests, about (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of all cases (default: %(default)s)")
    options = parser.parse_args()
    key, token = secrets.token_hex(16), secrets.token_hex(16)
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["--request-timeout", f"{TIMEOUT_S:g}"]
        for option, text in (("--api-keys", f"{key} fuzz\n"), ("--token-file", token)):
            arguments += [option, str(secret_file(Path(folder) / option, text))]
        with LocalStack(
            DEMO,
            worker_arguments=["--blocks", "512"],
            gateway_listen="127.0.0.1:0",
            gateway_arguments=arguments,
        ) as stack:
            return run(Fuzzed(stack.gateway_address, key, token), options.count, options.seed)


if __name__ == "__main__":
    sys.exit(main())
