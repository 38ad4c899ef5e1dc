"""The rules of other projects, judged by the same labels."""
