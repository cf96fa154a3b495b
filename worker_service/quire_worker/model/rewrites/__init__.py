"""A pass over a loaded model that puts kernels of `quire_cpu` where transformers has modules that they compute as well.

    interface      what a rewrite is: a pattern that it knows, and what it makes of a module that fits
    recording      what the modules of a model were given, and gave, in one forward pass
    rewriter       the pass: tries each rewrite on what was recorded, and keeps those that give the same

and one rewrite a file, from the smallest:

    norm           RMSNorm: one kernel
    linear         a linear layer: weights packed once
    tied_head      a vocabulary head that shares its weights with the embedding: packed once for both
    gated_mlp      silu(gate) * up, then down: two products, the first with its activation
    attention      q/k/v in one product, then norms of heads and rotary embedding in one kernel
    decoder_layer  the residual sums: added where the product before them writes its result
    decoder        the loop over the layers, without transformers' masks and hooks between them

    on_gpu         the same patterns on Triton's kernels and cuBLAS
    devices        which of all these there are for a device

Names of classes count for nothing: a module is replaced if its parts fit the pattern and its replacement gives what the
module itself gave, for what it was given. Everything else stays as it is. Weights are packed module by module and the
originals are let go of, so that there is no second copy of the model.
"""
