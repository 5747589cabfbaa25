"""How well the confidence of attacks agrees with the truth."""
