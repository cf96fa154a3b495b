"""What both sides of the session protocol say: steps, their packed columns, limits, permissions, the state digest."""
