"""What the owner of a pool says in a step, and what a step did: the public names of `quire.protocol.steps`."""

from quire.protocol.steps import Copy, GrowOutcome, Result, StepBuilder, StepOutcome, Swap, Victim

__all__ = ["Copy", "GrowOutcome", "Result", "StepBuilder", "StepOutcome", "Swap", "Victim"]
