"""Makes a draft model from any target: the target writes, a small student learns to write alike."""
