"""What leaks of clients that take several local steps, use Adam, or have batches under MJP."""
