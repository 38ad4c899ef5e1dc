"""Links in messages by which whoever gets them acknowledges or silences, once, without logging in."""
