"""OpenAI's Responses API: the gateway stores the turns of conversations.

    1. requests    turns a body, and the response that it continues, into a chat (`requests`, `items`)
    2. form        writes the answer as items, and as the events of a stream (`form`)
    3. store       keeps the items, and the tokens whose pages are cached (`store`)
    4. endpoints   create, get, cancel, delete, list of input items (`endpoints`, `background`)

A response continues another one with the tokens that the model read and wrote (`quire_gateway.continuing`).
"""
