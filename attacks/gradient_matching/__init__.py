"""Gradient matching: optimise images until a simulated client's gradient equals the received one.

All attacks share one optimisation loop (`engine`) and simulated clients (`simulation`), and are composed of
exchangeable parts: `distances`, `priors`, `optimisers`, `labels`. A named attack is a small file that composes these
parts and cites its paper.
"""
