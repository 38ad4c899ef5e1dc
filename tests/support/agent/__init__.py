"""The agent, and the service as the agent sees it."""
