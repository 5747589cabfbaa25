"""Servers that choose the parameters that they send, so that a large batch sends the gradient of single images."""
