"""What an active server reads from bins and traps in the model that it sends."""
