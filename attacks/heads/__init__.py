"""Heads that read every token of an image: what their gradient says of the tokens, and the image that has them."""
