"""MP3's tables and figures in kind: fine-tuning after predicting places, and what the encoder computes."""
