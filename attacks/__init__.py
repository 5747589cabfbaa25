"""The adversary: closed-form and optimisation attacks on the updates of federated ViTs.

Imports torch and scipy, never `fedmjp` and never Flower: an attack sees `Observation`s and nothing else.
"""
