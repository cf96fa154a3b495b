"""Values of the session protocol that owners and the allocator share: steps, packed columns, limits, permissions, state
digest.
"""
