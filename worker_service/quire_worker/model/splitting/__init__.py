"""Splitting of a model over the ranks of a tensor-parallel crew.

    attention    each rank has some of the query heads, and the KV heads that these read
    MLP          each rank has some of the intermediate elements, of every expert
    the rest     every rank computes it whole: embeddings, norms, routers, recurrent states, the head

A split module is wrapped: the wrapper adds up the ranks' results (`Summed`). Inside, it is an ordinary module of
transformers with fewer heads or a narrower middle, so that kernels replace it as they do elsewhere.

transformers splits models, too, through tensors that know their placement. But it requires a number of KV heads that
the ranks divide, leaves attention whole in several families, needs another package, and differs between the versions
that are supported (docs/decisions/0027-ranks.md).
"""
