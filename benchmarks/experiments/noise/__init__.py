"""Gaussian noise on updates: what attacks that weigh it recover, beside the least error that the equations allow."""
