"""Models of spoken words: MP3 as pre-training, and what their updates leak."""
