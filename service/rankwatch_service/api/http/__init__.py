"""What holds for every request: the gate, authorization, bodies, problems, pages and cursors of lists."""
