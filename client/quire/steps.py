"""What an owner says in a step, and what a step did: public names of `quire.protocol.steps` and `outcomes`."""

from quire.protocol.outcomes import Copy, GrowOutcome, Result, StepOutcome, Swap, Victim
from quire.protocol.steps import StepBuilder

__all__ = ["Copy", "GrowOutcome", "Result", "StepBuilder", "StepOutcome", "Swap", "Victim"]
