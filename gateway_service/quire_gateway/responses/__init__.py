"""OpenAI's responses: conversations whose turns the gateway keeps.

    1. requests    a body, and the response that it continues, as the chat that is asked (`requests`, `items`)
    2. form        the answer as items, and as the events of a stream (`form`)
    3. store       what is kept: the items, and the tokens that pages were computed for (`store`)
    4. endpoints   create, get, cancel, delete, list of input items (`endpoints`, `background`)

A response continues another one by its tokens, as the model has read and written them (`quire_gateway.continuing`).
"""
