"""What the agent asks the ranks of its host when their job hangs."""
