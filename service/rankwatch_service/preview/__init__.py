"""What a change would have done, before it is made: other tunings, a rule on a metric, or another policy."""
