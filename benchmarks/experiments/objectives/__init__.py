"""What an update leaks under each objective."""
