"""Gradient matching: images are sought whose gradient is the one received.

One engine (`engine`), simulated clients (`simulation`), and parts to exchange: `distances`, `priors`, `optimisers`,
`labels`. A named attack is a small file that composes them and cites its paper.
"""
