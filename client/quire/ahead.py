"""Room for tokens to come, for engines that plan their own turns: the public names of `quire.session.lookahead`."""

from quire.session.lookahead import AHEAD_TOKENS, Decoding, RoomAhead

__all__ = ["AHEAD_TOKENS", "Decoding", "RoomAhead"]
