"""What each rank of a tensor-parallel crew computes of a model.

    attention    each rank has some of the query heads, and the KV heads that these read
    MLP          each rank has some of the intermediate elements, of every expert
    the rest     every rank computes it whole: embeddings, norms, routers, recurrent states, the head

A module of which each rank has a part is wrapped: what the ranks give is added up (`Summed`). Inside, it is an ordinary
module of transformers with fewer heads or a narrower middle, so that kernels take its place as they do elsewhere.

transformers splits models, too, through tensors that know their placement. It asks for KV heads that divide by the
ranks, leaves attention whole in several families, needs another package, and differs between the versions that are
served (docs/decisions/0027-ranks.md).
"""
