"""HTTP rules that apply to every request: the gate, authorization, bodies, problems, pages and cursors of lists."""
