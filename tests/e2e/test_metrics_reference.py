"""docs/metrics.md equals the code's metrics, and what real processes answer to a scrape."""

from __future__ import annotations

import re
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families
from quire import Client
from quire.local import LocalStack

from scripts.metrics_reference import DOCUMENT, name_of, reference
from tests.e2e.stack import DEMO

ROW = re.compile(r"\| `(?P<name>[\w:]+)` \| (?P<type>\w+) \| (?P<labels>.*?) \| (?P<meaning>.+) \|")
Row = tuple[str, frozenset[str], str]  # type, labels, meaning


def documented() -> dict[str, dict[str, Row]]:
    """Returns the rows of the page by the title of their table, then by metric name."""
    tables: dict[str, dict[str, Row]] = {}
    for line in DOCUMENT.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            rows = tables.setdefault(line.removeprefix("## "), {})
        elif found := ROW.fullmatch(line):
            rows[found["name"]] = (found["type"], frozenset(re.findall(r"\w+", found["labels"])), found["meaning"])
    return tables


def scraped(address: str) -> dict[str, tuple[str, set[frozenset[str]], str]]:
    """Returns Quire's metric families by name: type, label sets of the samples, help."""
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    return {
        name_of(family): (
            family.type,
            {frozenset(sample.labels) - {"le"} for sample in family.samples},
            family.documentation,
        )
        for family in families
        if not family.name.startswith(("process_", "python_"))
    }


def test_the_document_is_what_the_code_says() -> None:
    assert DOCUMENT.read_text(encoding="utf-8") == reference()


@pytest.mark.timeout(180)
def test_every_series_of_a_live_scrape_is_documented_and_every_documented_one_is_scraped() -> None:
    tables = documented()
    tables["Worker"] |= tables.pop("Worker, with --vllm-metrics")
    options = ["--vllm-metrics"]
    with LocalStack(DEMO, gateway_listen="127.0.0.1:0", worker_arguments=options, drain_timeout_s=5) as stack:
        assert stack.allocator is not None
        assert stack.worker is not None
        with Client(stack.worker_address) as client:
            client.generate("The for", max_tokens=4, ignore_eos=True)
        addresses = {
            "Allocator": stack.allocator.metrics_address,
            "Worker": stack.worker.metrics_address,
            "Gateway": stack.gateway_address,
        }
        assert {*addresses, "Every server"} == set(tables)
        sampled = 0
        for service, address in addresses.items():
            expected = tables[service] | tables["Every server"]
            found = scraped(address)
            assert set(found) == set(expected), service
            for name, (kind, labels, meaning) in expected.items():
                assert found[name][0::2] == (kind, meaning)
                assert found[name][1] <= {labels}, name
                sampled += len(found[name][1])
        assert sampled > 40
