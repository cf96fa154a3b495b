"""From logits to tokens: what a request may ask for, and how one token after the other is chosen by it."""
