"""A pass over a loaded model that replaces transformers' modules by kernels of `quire_cpu` with the same results.

    interface      interface of a rewrite: it recognizes a pattern of modules, and builds replacements
    recording      inputs and outputs of a model's modules in one forward pass
    rewriter       the pass: tries each rewrite on the recorded inputs, and keeps it if the outputs are the same

There is one file per rewrite, from the smallest to the largest:

    norm           RMSNorm: one kernel
    linear         a linear layer: weights packed once
    tied_head      a vocabulary head that shares its weights with the embedding: they are packed only once
    gated_mlp      silu(gate) * up, then down: two products, the first with its activation
    attention      q/k/v in one product, then norms of heads and rotary embedding in one kernel
    decoder_layer  the residual sums: added by the kernel of the product before them
    decoder        the loop over the layers, without transformers' masks and hooks between them

    on_gpu         the same patterns on Triton's kernels and cuBLAS
    devices        chooses the rewrites for a device

Class names do not matter. A module is replaced if its parts fit the pattern, and the replacement gives the recorded
output for the recorded input. All other modules stay unchanged. Weights are packed module by module, and the originals
are freed, so memory never holds a second copy of the model.
"""
