"""Tool calls and reasoning, in the notation that a model was trained to write.

    1. tools     the tools that a caller offers, and whether one must be called (`tools`)
    2. format    a declaration of how the model writes calls and reasoning (`formats`). An option names it, or it is
                 recognized from the text that the chat template makes of a call (`recognition`)
    3. grammar   the constraint on the answer: free text in which a call that has begun fits its schema (`grammars`)
    4. reader    splits the answer's text, in pieces of any size, into content, reasoning and calls (`reader`)

If a call is required, the model's format does not matter: the whole answer is a structure, declared as a format.
Adding a format means adding a declaration. Everything but `recognition` is pure.
"""
