"""Pieces of photographs put back in their places."""
