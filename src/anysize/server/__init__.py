"""What the server does in a round, and how it measures a state."""
