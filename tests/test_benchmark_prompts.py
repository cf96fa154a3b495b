"""No round of a benchmark, including the warm-up, repeats another round's prompts, because the cache would serve
them.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from allocator_sides import workload
from load_sides import arrivals
from serving_sides.workload import KINDS, Workload

ROUNDS = range(-2, 5)  # Negative rounds are warm-up, and are not measured.


def test_no_two_rounds_of_the_allocators_benchmark_share_a_digest() -> None:
    seen: set[bytes] = set()
    drawn = [workload.draw_round(number) for number in ROUNDS]
    texts = [b"".join((*each.prompts, *each.fillers, *each.newcomers)) for each in drawn]
    texts.append(b"".join(each.digests for each in workload.draw_decoded(len(ROUNDS))))
    for text in texts:
        size = workload.DIGEST_BYTES
        digests = {text[first : first + size] for first in range(0, len(text), size)}
        assert not digests & seen
        seen |= digests
    tokens = [tuple(each.tokens[:16]) for each in drawn] + [tuple(short[:16]) for each in drawn for short in each.short]
    assert len(set(tokens)) == len(tokens)


def test_no_two_rounds_of_the_serving_benchmark_share_a_prompt() -> None:
    prompts = [
        tuple(request["prompt"][:16])
        for kind, count, number in itertools.product(KINDS, (1, 8), ROUNDS)
        for request in Workload(kind, count, prompt_tokens=64, output_tokens=16).draw(number, vocabulary=2048)
    ]
    assert len(set(prompts)) == len(prompts)


def test_arrivals_of_different_loads_repeat_no_prompt_and_come_at_their_rate(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"input_length": 640, "output_length": 80}\n{"input_length": 6400, "output_length": 8}\n')
    lengths = arrivals.lengths_of(trace)
    assert lengths == [(10, 10), (100, 2)]
    loads = [
        arrivals.draw(lengths, rate=rate, count=400, vocabulary=2_048, seed=f"load {rate}") for rate in (5.0, 50.0)
    ]
    prompts = [tuple(each.prompt) for load in loads for each in load]
    assert len({*prompts}) == len(prompts)
    assert {(len(each.prompt), each.output_tokens) for load in loads for each in load} == {*lengths}
    for rate, load in zip((5.0, 50.0), loads, strict=True):
        times = [each.at_s for each in load]
        assert times == sorted(times)
        assert 0.8 < times[-1] * rate / 400 < 1.25  # The limits are four standard deviations away from the mean.
