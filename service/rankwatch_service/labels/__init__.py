"""Labels of incidents, by which they are routed and silenced, and the matchers on them. Pure."""
