"""What clients notice of active servers, and what of honest ones."""
