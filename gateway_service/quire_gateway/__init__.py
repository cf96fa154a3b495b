"""The gateway: OpenAI's endpoints in front of Quire's workers."""
