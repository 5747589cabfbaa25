"""What an active server gets out of large batches."""
