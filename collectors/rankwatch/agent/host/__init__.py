"""Counters of the host itself and of its network ports, from /proc and /sys."""
