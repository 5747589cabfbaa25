"""Federated training of a small timm ViT on photographs of 32 x 32 pixels, audited by FedMJP."""
