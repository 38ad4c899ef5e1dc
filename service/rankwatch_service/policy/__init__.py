"""What may be done about an incident: rules, suggestions, checkpoints to go back to, receivers to notify. Pure."""
