"""Trains language models with every kind of feed-forward layer on real text, and compares what they learn."""
