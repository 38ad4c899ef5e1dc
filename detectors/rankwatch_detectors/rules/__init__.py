"""Rules that people write about metrics of their own: what a script logs and no other detector knows."""
