"""UPerNet on small encoders, with and without MJP."""
