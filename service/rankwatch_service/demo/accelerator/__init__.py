"""An accelerator for those who have none: it has streams, events and collectives, and computes nothing."""
