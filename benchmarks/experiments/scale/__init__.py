"""How time and memory grow with the clients of a round and with the rows of a report."""
