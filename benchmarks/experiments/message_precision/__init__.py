"""What leaks when a part of the update is not sent."""
