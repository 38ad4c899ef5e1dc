"""Values over steps and ranks, and over time and devices, for charts."""
