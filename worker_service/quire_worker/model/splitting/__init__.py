"""Splitting of a model over the ranks of a tensor-parallel crew.

    attention    each rank has some of the query heads, and the KV heads that these read
    MLP          each rank has some of the intermediate elements, of every expert
    the rest     every rank computes it whole: embeddings, norms, routers, recurrent states, the head

A split module is wrapped: the wrapper adds up the ranks' results (`Summed`). Inside, it is an ordinary module of
transformers with fewer heads or a narrower middle, so kernels can replace it like any other module.

transformers can split models, too, through tensors that know their placement (DTensor). transformers' plan is not used
here, because the number of ranks must divide the KV heads, several families keep whole attention, it needs another
package, and it differs between the supported versions (docs/decisions/0027-ranks.md).
"""
