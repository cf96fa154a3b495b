"""Values of the session protocol, for both sides: steps, their packed columns, limits, permissions, state digest."""
