"""FedMJP: how much does a federated Vision Transformer leak, and what is a defence worth?"""

__version__ = "0.1.0"
