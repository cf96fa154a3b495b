"""Bodies of requests about branches, with the words of `quire.AsyncBranch`. An unknown field is refused by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from quire_gateway.bodies import Body, Count, Flag, Logprobs, Number, PromptBody, PromptTokens

CANDIDATES_MAX = 256
FORKS_MAX = 64
TTL_S_MIN, TTL_S_MAX, TTL_S_DEFAULT = 0.1, 3_600.0, 60.0  # the workers' bounds


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PrefillBody(PromptBody):
    """Body of POST /v1/branches: a text, tokens or a chat."""

    ttl_s: Annotated[Number, Field(ge=TTL_S_MIN, le=TTL_S_MAX)] = TTL_S_DEFAULT
    cache_no_store: Flag = False


class ForkBody(_Strict):
    """Body of POST /v1/branches/{id}/fork."""

    count: Annotated[Count, Field(le=FORKS_MAX)] = 1


class ExtendBody(_Strict):
    """Body of POST /v1/branches/{id}/extend."""

    continuation: str | PromptTokens


class ScoreBody(_Strict):
    """Body of POST /v1/branches/{id}/score."""

    candidates: Annotated[list[str | PromptTokens], Field(min_length=1, max_length=CANDIDATES_MAX, fail_fast=True)]


def _no_logprobs(given: object) -> object:
    """Returns how many logprobs are wanted. False means none."""
    return None if given is False else given


class GenerateBody(Body):
    """Body of POST /v1/branches/{id}/generate: the body of a completion, without a prompt."""

    max_tokens: Count | None = None
    logprobs: Annotated[Logprobs | None, BeforeValidator(_no_logprobs)] = None
