"""What augmentation at the client changes for attacks over several updates."""
