"""Calls of tools and reasoning, in the notation that a model was trained to write.

    1. tools      what a caller offers, and which of it has to be called (`tools`)
    2. format     how the model writes a call, and what it thinks: a declaration (`formats`), named by an option or
                  recognized by what the chat template makes of a call (`recognition`)
    3. grammar    what the worker holds the answer to: free text in which a call that has begun fits its schema
                  (`grammars`)
    4. reader     the answer's text, in pieces of any size, as content, reasoning, and calls (`reader`)

A call that has to be made needs no format of the model: the whole answer is a structure, which has a declaration, too.
Adding a format means adding a declaration. Everything but `recognition` is pure.
"""
