"""A classifier by `score`: the likeliest label wins. Instructions and examples are computed once for all texts.

Needs a clone and `pip install '.[all]'`; starts its own servers with the demo model.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire import AsyncClient
from stack import run

EXAMPLES = "The for statement iterates. Topic: loops\nThe if statement selects. Topic: conditions\n"
LABELS = (" loops", " conditions", " exceptions")
TEXTS = ("The while statement repeats. ", "The try statement handles errors. ", "The elif clause is a choice. ")


async def classify(client: AsyncClient, texts: Sequence[str] = TEXTS) -> list[tuple[str, dict[str, float]]]:
    """Returns for each text its label, and the mean log probability of the tokens of every label."""
    found = []
    async with await client.prefill(EXAMPLES) as root:
        for text in texts:
            (branch,) = await root.fork(1)
            async with branch:
                await branch.extend(f"{text}Topic:")
                scores = await branch.score(LABELS)
            by_label = {label: score.mean_logprob for label, score in zip(LABELS, scores, strict=True)}
            found.append((max(by_label, key=lambda label: by_label[label]), by_label))
    return found


if __name__ == "__main__":
    for text, (label, _) in zip(TEXTS, run(classify), strict=True):
        print(f"{label.strip():>12}  {text}")
