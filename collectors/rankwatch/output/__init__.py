"""What a rank has printed: its end is kept, and when the rank ends or hangs, the lines that say why are chosen."""
