"""Values of the session protocol that both sides share: steps, packed columns, limits, permissions, state digest."""
