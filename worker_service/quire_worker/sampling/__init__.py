"""From logits to tokens: the sampling parameters of a request, and the choice of each token by them."""
