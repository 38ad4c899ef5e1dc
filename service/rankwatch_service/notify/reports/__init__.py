"""What the notifier reports of itself: counts of notifications, and the heartbeat."""
