"""What goes wrong in a long run without an exit status: seen, and said in one line.

Nothing here changes what is trained. What is found goes to `run`, which ends the run.
"""
