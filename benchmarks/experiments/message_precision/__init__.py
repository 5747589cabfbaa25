"""What leaks when the message has fewer digits, or fewer entries."""
